"""Losses of weince as losses of pytorch-metric-learning: ``loss(embeddings, labels)``.

    from weince.integrations.metric_learning import MetricLossAdapter

    loss = MetricLossAdapter(weince.DCLLoss(0.1, candidates="labels"))  # was: SupConLoss(temperature=0.1)
    loss(embeddings, labels).backward()

It works in that library's trainers, with its miners, and in its ``DistributedLossWrapper``. Its ``CrossBatchMemory``
and ``SelfSupervisedLoss`` accept only losses on a list of names; :class:`CrossBatchMemory` and
:class:`SelfSupervisedLoss` of this module are the same with :class:`MetricLossAdapter` on the list.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import weince
from weince.distributed import is_spread
from weince.layouts import Layout, problems
from weince.pairs import CHOSEN, NOT_IGNORED, OTHER_LABEL, SAME_LABEL, Problem

try:
    from pytorch_metric_learning import losses
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_pairs
except ImportError as error:
    raise ImportError(
        "weince.integrations.metric_learning needs pytorch-metric-learning: "
        f"pip install pytorch-metric-learning ({error})"
    ) from error

__all__ = ["CrossBatchMemory", "MetricLossAdapter", "SelfSupervisedLoss"]


class MetricLossAdapter(losses.BaseMetricLossFunction):  # type: ignore[misc]
    """Any loss of weince over labels, with the call signature of pytorch-metric-learning.

    Every row is an anchor, the other rows with its label are its positives, and the rows with other labels its
    negatives. With ``ref_emb`` and ``ref_labels`` the anchors are the rows of ``embeddings``, and all rows of
    ``ref_emb`` are their candidates. With ``indices_tuple``, pairs or triplets of a miner or a memory, an anchor has
    the positives and negatives that were chosen for it; two matrices of booleans hold the choice.

    Anchors without a positive are left out of the mean; if no anchor has one, the loss is 0.

    Args:
        loss: A loss with ``candidates="labels"`` and ``reduction="mean"``. Its ``gather`` has no effect, since
            ``DistributedLossWrapper`` gathers over devices.

    Examples:
        >>> import torch
        >>> from weince import DCLLoss
        >>> from weince.integrations.metric_learning import MetricLossAdapter
        >>> loss = MetricLossAdapter(DCLLoss(0.1, candidates="labels"))
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
        self.loss = loss

    def get_default_distance(self) -> CosineSimilarity:
        return CosineSimilarity()

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Sequence[Tensor] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, Any]:
        """The loss, in the form that the library's reducers expect."""
        if indices_tuple is None and (labels is None or ref_labels is None):
            missing = "labels" if labels is None else "ref_labels"
            raise ValueError(f"this loss wants a label for every row, or an indices_tuple; {missing} is None")
        if embeddings.shape[1:] != ref_emb.shape[1:]:
            raise ValueError(
                f"ref_emb must have the width of embeddings, {tuple(embeddings.shape)}; got {tuple(ref_emb.shape)}"
            )
        # Nothing to contrast with: at most one row, or references that are still an empty memory.
        if len(ref_emb) <= (ref_emb is embeddings) or not len(embeddings):
            return dict(self.zero_losses())
        if indices_tuple is None and ref_emb is embeddings and ref_labels is labels and not is_spread():
            value = self.loss(embeddings, labels=labels)
        else:
            value = self._against(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        return {"loss": {"losses": value, "indices": None, "reduction_type": "already_reduced"}}

    def _against(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Sequence[Tensor] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Tensor:
        """Mean loss of the anchors that have a positive among the references, which are those of this process."""
        problem = self._problem(embeddings, labels)
        if ref_emb is not embeddings or ref_labels is not labels or indices_tuple is not None:
            others = self._problem(ref_emb, ref_labels)
            common = torch.promote_types(problem.anchors.dtype, others.anchors.dtype)
            problem = replace(
                problem,
                anchors=problem.anchors.to(common),
                candidates=others.anchors.to(common),
                of_anchor={"label": problem.of_anchor["label"]},
                of_candidate=others.of_candidate,
                negatives=(OTHER_LABEL,),
                positives=(SAME_LABEL,),
                raw=None,
                symmetric=False,
            )
        if indices_tuple is not None:
            a1, positives, a2, negatives = convert_to_pairs(indices_tuple, labels)
            chosen = torch.zeros(len(embeddings), len(ref_emb), dtype=torch.bool, device=embeddings.device)
            ignore = torch.ones_like(chosen)
            chosen[a1, positives] = True
            ignore[a2, negatives] = False
            problem = replace(
                problem,
                of_anchor={"chosen": chosen, "ignore": ignore},
                negatives=(NOT_IGNORED,),
                positives=(CHOSEN,),
            )
        result = self.loss.contrast(problem, self.loss.need(problem, self.loss.tail))
        assert result.counted is not None
        return result.losses.sum() / result.counted.sum().clamp_min(1)

    def _problem(self, rows: Tensor, labels: Tensor | None) -> Problem:
        """All rows against all rows, without those of other devices."""
        layout = Layout("labels", score=self.loss.score, check_finite=self.loss.check_finite)
        known = torch.zeros(len(rows), dtype=torch.int64, device=rows.device) if labels is None else labels
        return problems(layout, rows, labels=known, alone=False)[0]


class CrossBatchMemory(losses.CrossBatchMemory):  # type: ignore[misc]
    """``CrossBatchMemory`` of pytorch-metric-learning, which also takes a :class:`MetricLossAdapter`.

    Examples:
        >>> import torch
        >>> from weince import SupConLoss
        >>> from weince.integrations.metric_learning import CrossBatchMemory, MetricLossAdapter
        >>> loss = CrossBatchMemory(MetricLossAdapter(SupConLoss(0.1)), embedding_size=8, memory_size=64)
        >>> loss(torch.randn(16, 8), torch.randint(4, (16,))).shape
        torch.Size([])
    """

    @staticmethod
    def supported_losses() -> list[str]:
        return [*losses.CrossBatchMemory.supported_losses(), MetricLossAdapter.__name__]


class SelfSupervisedLoss(losses.SelfSupervisedLoss):  # type: ignore[misc]
    """``SelfSupervisedLoss`` of pytorch-metric-learning, which also takes a :class:`MetricLossAdapter`.

    Examples:
        >>> import torch
        >>> from weince import SupConLoss
        >>> from weince.integrations.metric_learning import MetricLossAdapter, SelfSupervisedLoss
        >>> loss = SelfSupervisedLoss(MetricLossAdapter(SupConLoss(0.1)))
        >>> loss(torch.randn(16, 8), torch.randn(16, 8)).shape
        torch.Size([])
    """

    @staticmethod
    def supported_losses() -> list[str]:
        return [*losses.SelfSupervisedLoss.supported_losses(), MetricLossAdapter.__name__]
