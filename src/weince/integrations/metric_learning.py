"""WEINCE as a loss of pytorch-metric-learning: ``loss(embeddings, labels)``.

    from weince.integrations.metric_learning import WeinceLoss

    loss = WeinceLoss(temperature=0.1)  # was: pytorch_metric_learning.losses.SupConLoss(temperature=0.1)
    loss(embeddings, labels).backward()

It goes into that library's trainers and its ``DistributedLossWrapper``, and without the correction (lam = 0) it is
its ``SupConLoss``. It takes no miner: a miner chooses pairs, while the tail is a matter of all negatives. For two
views without labels take :class:`weince.WeinceLoss`.
"""

from typing import Any, TypedDict, Unpack

from torch import Tensor

import weince
from weince.candidates import Contest, contests
from weince.engines.choose import Engine, run
from weince.links import Scalar
from weince.tail import TailConfig
from weince.terms import Term

try:
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.losses import BaseMetricLossFunction
except ImportError as error:
    raise ImportError(
        "weince.integrations.metric_learning needs pytorch-metric-learning: "
        f"pip install pytorch-metric-learning ({error})"
    ) from error


class WeinceOptions(TypedDict, total=False):
    """Options of :class:`WeinceLoss`; see :class:`weince.WeinceLoss`."""

    extra: list[Term]
    engine: Engine
    check_finite: bool | None


class WeinceLoss(BaseMetricLossFunction):  # type: ignore[misc]
    """WEINCE over labels (SupCon, outside the logarithm), called as pytorch-metric-learning calls its losses.

    Every row is an anchor, the other rows with its label are its positives, and the rows with other labels its
    negatives. The denominator of a positive holds all rows but the anchor. Anchors without a positive are left out of
    the mean; a batch without any gives 0.

    With ``ref_emb`` and ``ref_labels`` the anchors are the rows of ``embeddings``, and all rows of ``ref_emb`` are
    their candidates.

    Args:
        temperature: Of the softmax part; a number or an ``nn.Parameter``.
        tail: How the tail is fitted and gated.
        **options: ``extra``, ``engine`` and ``check_finite`` of :class:`weince.WeinceLoss`.
    """

    def __init__(
        self,
        temperature: Scalar = 0.5,
        *,
        tail: TailConfig = TailConfig(),
        **options: Unpack[WeinceOptions],
    ) -> None:
        super().__init__()
        # Gathering over devices is the work of DistributedLossWrapper.
        self.loss = weince.WeinceLoss(temperature, tail=tail, candidates="labels", gather=False, **options)

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
        """The loss, in the form that the library's reducers take."""
        if indices_tuple is not None:
            raise ValueError(
                "WeinceLoss takes no indices_tuple: the tail of an anchor needs all of its negatives, not those that "
                f"a miner or a memory chose; got {len(indices_tuple)} tensors of indices"
            )
        if labels is None or ref_labels is None:
            missing = "labels" if labels is None else "ref_labels"
            raise ValueError(f"WeinceLoss wants a label for every row; got no {missing}")
        # Nothing to contrast with: rows that stand alone, or a memory of references that is still empty.
        if len(ref_emb) <= (ref_emb is embeddings) or not len(embeddings):
            zero: dict[str, Any] = self.zero_losses()
            return zero
        if ref_emb is embeddings:
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
        own, references = (
            contests("labels", rows, labels=of_rows, check_finite=self.loss.check_finite, alone=False)[
                0
            ].anchors
            for rows, of_rows in ((embeddings, labels), (ref_emb, ref_labels))
        )
        contest = Contest(own, references, labels=(labels, ref_labels))
        terms = self.loss._terms()
        tail = terms[0].link.tail  # type: ignore[attr-defined]
        output = run(contest, terms, tail, engine=self.loss.engine, same_weight=True)
        assert output.counted is not None
        return output.loss.sum() / output.counted.sum().clamp_min(1)
