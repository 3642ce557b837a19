"""Losses of weince as losses of pytorch-metric-learning: ``loss(embeddings, labels)``.

    from weince.integrations.metric_learning import LossAdapter

    loss = LossAdapter(weince.DCLLoss(0.1, candidates="labels"))  # was: SupConLoss(temperature=0.1)
    loss(embeddings, labels).backward()

It works in that library's trainers and in its ``DistributedLossWrapper``. It accepts no miner: a miner chooses pairs,
but these losses sum over all negatives. For two views without labels, use the loss itself.
"""

from typing import Any, Unpack

from torch import Tensor

import weince
from weince.layouts import Layout, problems
from weince.losses.weince import WeinceOptions
from weince.pairs import OTHER_LABEL, SAME_LABEL, Problem
from weince.parameters import Scalar
from weince.sums import Need

try:
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.losses import BaseMetricLossFunction
except ImportError as error:
    raise ImportError(
        "weince.integrations.metric_learning needs pytorch-metric-learning: "
        f"pip install pytorch-metric-learning ({error})"
    ) from error

__all__ = ["LossAdapter", "WeinceLoss"]


class LossAdapter(BaseMetricLossFunction):  # type: ignore[misc]
    """Any loss of weince over labels, with the call signature of pytorch-metric-learning.

    Every row is an anchor, the other rows with its label are its positives, and the rows with other labels its
    negatives. Anchors without a positive are left out of the mean; if no anchor has one, the loss is 0.

    With ``ref_emb`` and ``ref_labels`` the anchors are the rows of ``embeddings``, and all rows of ``ref_emb`` are
    their candidates.

    Args:
        loss: A loss with ``candidates="labels"`` and ``reduction="mean"``. Its ``gather`` is set to False, since
            ``DistributedLossWrapper`` gathers over devices.

    Examples:
        >>> import torch
        >>> from weince import DCLLoss
        >>> from weince.integrations.metric_learning import LossAdapter
        >>> loss = LossAdapter(DCLLoss(0.1, candidates="labels"))
        >>> loss(torch.randn(16, 8), torch.randint(4, (16,))).shape
        torch.Size([])
    """

    def __init__(self, loss: weince.ContrastiveLoss) -> None:
        super().__init__()
        if not isinstance(loss, weince.ContrastiveLoss):
            raise TypeError(f"loss must be a loss of weince, like DCLLoss(); got {type(loss).__name__}")
        if loss.candidates != "labels" or loss.reduction != "mean":
            raise ValueError(
                'wanted a loss with candidates="labels" and reduction="mean"; '
                f"got {loss.candidates!r} and {loss.reduction!r}"
            )
        loss.gather = False
        self.loss = loss

    def get_default_distance(self) -> CosineSimilarity:
        return CosineSimilarity()

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> dict[str, Any]:
        """The loss, in the form that the library's reducers expect."""
        if indices_tuple is not None:
            raise ValueError(
                "this loss takes no indices_tuple: it sums over all negatives of an anchor, not over those that "
                f"a miner or a memory chose; got {len(indices_tuple)} tensors of indices"
            )
        if labels is None or ref_labels is None:
            missing = "labels" if labels is None else "ref_labels"
            raise ValueError(f"this loss wants a label for every row; got no {missing}")
        # Nothing to contrast with: at most one row, or references that are still an empty memory.
        if len(ref_emb) <= (ref_emb is embeddings) or not len(embeddings):
            zero: dict[str, Any] = self.zero_losses()
            return zero
        if ref_emb is embeddings and ref_labels is labels:
            value = self.loss(embeddings, labels=labels)
        else:
            value = self._against(embeddings, labels, ref_emb, ref_labels)
        return {"loss": {"losses": value, "indices": None, "reduction_type": "already_reduced"}}

    def _against(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Tensor:
        """Mean loss of the anchors that have a positive among the references."""
        if embeddings.shape[1:] != ref_emb.shape[1:] or embeddings.dtype != ref_emb.dtype:
            raise ValueError(
                "embeddings and ref_emb must have the same width and dtype; got "
                f"{embeddings.dtype} {tuple(embeddings.shape)} and {ref_emb.dtype} {tuple(ref_emb.shape)}"
            )
        layout = Layout("labels", check_finite=self.loss.check_finite)
        [own] = problems(layout, embeddings, labels=labels, alone=False)
        [others] = problems(layout, ref_emb, labels=ref_labels, alone=False)
        problem = Problem(
            own.anchors,
            others.anchors,
            {"label": own.of_anchor["label"]},
            others.of_candidate,
            (OTHER_LABEL,),
            (SAME_LABEL,),
        )
        result = self.loss._contrast(problem, Need(self.loss.tail, self.loss.hardest))
        counted = result.counted
        return result.losses.mean() if counted is None else result.losses.sum() / counted.sum().clamp_min(1)


class WeinceLoss(LossAdapter):
    """WEINCE over labels; the mean over positives is outside the logarithm, as in SupCon.

    Args:
        temperature: Temperature of the softmax part; a number or an ``nn.Parameter``.
        **options: As in :class:`weince.WeinceLoss`.

    Examples:
        >>> import torch
        >>> from weince.integrations.metric_learning import WeinceLoss
        >>> WeinceLoss(0.1)(torch.randn(16, 8), torch.randint(4, (16,))).shape
        torch.Size([])
    """

    def __init__(self, temperature: Scalar = 0.5, **options: Unpack[WeinceOptions]) -> None:
        options["candidates"] = "labels"
        super().__init__(weince.WeinceLoss(temperature, **options))
