"""The losses as pure functions of embeddings.

All share the options of :func:`link_loss`. The modules in :mod:`weince.losses` hold the same options.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from weince.candidates import Candidates, check_choice, contests
from weince.distributed import Gather, Ranks, check_gather, is_spread, meet, share
from weince.engines.choose import Engine, why_no_kernels
from weince.engines.choose import run as run_engine
from weince.engines.ring import ring
from weince.engines.rows import EngineOutput
from weince.links import BlendLink, Link, PowerLink, Scalar, ShortfallLink, SoftmaxLink
from weince.tail import TailConfig, TailStats, fit_tail, gated
from weince.terms import Term, WeinceLink, described, terms_of

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)  # here: torch 2.6 cannot compile the call


class LossOutput(NamedTuple):
    """A loss with the tail statistics of its anchors."""

    loss: Tensor
    stats: TailStats


class LossOptions(TypedDict, total=False):
    """Options that every loss takes; see :func:`link_loss`."""

    candidates: Candidates
    extra: Sequence[Term]
    reduction: Reduction
    engine: Engine
    gather: Gather
    labels: Tensor | None
    negatives: Tensor | None
    ids: Tensor | None
    ignore: Tensor | None
    check_finite: bool | None
    return_stats: bool


def link_loss(
    z_i: Tensor,
    z_j: Tensor | None = None,
    *,
    link: Link,
    candidates: Candidates = "views",
    extra: Sequence[Term] = (),
    reduction: Reduction = "mean",
    engine: Engine = "auto",
    gather: Gather = True,
    labels: Tensor | None = None,
    negatives: Tensor | None = None,
    ids: Tensor | None = None,
    ignore: Tensor | None = None,
    check_finite: bool | None = None,
    return_stats: bool = False,
) -> Tensor | LossOutput:
    """Contrastive loss of paired embeddings under any link.

    Args:
        z_i: ``(n, d)`` embeddings of any floating dtype; they need not be normalised.
        z_j: ``(n, d)``, positives row by row.
        link: How a cosine becomes a logit.
        candidates: Who competes with whom, see :func:`weince.candidates.contests`.
        extra: Further terms to add, for example ``Term(SoftmaxLink(0.5), weight=0.5, hardest=50)``.
        reduction: ``"mean"`` over anchors, ``"sum"``, or ``"none"`` for one value per anchor: ``(2 n,)`` with
            ``"views"`` and ``"clip"``, in the order of ``z_i`` then ``z_j``; anchors without a positive have 0.
        engine: ``"dense"`` keeps the matrix of scores, ``"chunked"`` needs memory linear in the batch, ``"fused"`` is
            kernels for CUDA, ``"auto"`` chooses (:func:`weince.engines.choose` says which and why).
        gather: In a process group of several ranks, contrast the local anchors with the candidates of all ranks; the
            average of the ranks' losses and gradients is that of one process (:mod:`weince.distributed`). ``"ring"``
            passes candidates round, so that no rank holds them all.
        labels: ``(n,)`` integers, for ``candidates="labels"``.
        negatives: ``(m, d)`` further negatives of every anchor, for ``candidates="cross"``.
        ids: ``(n,)`` integers (with ``negatives`` also ``(n + m,)``); rows with equal ids are never negatives of each
            other.
        ignore: boolean, anchors by candidates: pairs that are not negatives.
        check_finite: Raise on NaN or inf in the embeddings; by default only where that costs no wait (CPU).
        return_stats: Return a :class:`LossOutput` with the tail statistics of each anchor.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    terms = terms_of(link, extra)
    tails = [term.link.tail for term in terms if isinstance(term.link, WeinceLink)]
    tail = tails[0] if tails else TailConfig() if return_stats else None
    check_gather(gather, engine)
    spread = bool(gather) and is_spread()
    plain = labels is None and negatives is None and ids is None and ignore is None and not check_finite
    if plain and candidates == "views" and engine in ("auto", "fused") and reduction != "none" and not spread:
        short = None if len(terms) > 1 else _small(z_i, z_j, link, reduction, return_stats)
        if short is not None:
            loss, stats = short
            return loss if stats is None else LossOutput(loss, stats)
    found = contests(
        candidates,
        z_i,
        z_j,
        labels=labels,
        negatives=negatives,
        ids=ids,
        ignore=ignore,
        check_finite=check_finite,
        alone=not spread,
    )
    settings = f"{candidates=}, {gather=}, {reduction=}, {described(terms)}, {tail=}" if spread else ""
    if spread and gather == "ring":
        found = [meet(contest, settings) for contest in found]
        outputs = [ring(contest, terms, tail) for contest in found]
    else:
        found = [share(contest, settings) for contest in found] if spread else found
        # A mean or a sum gives all anchors the same weight, which spares the chunked engine a sweep.
        same = reduction != "none"
        outputs = [run_engine(contest, terms, tail, engine=engine, same_weight=same) for contest in found]
    loss = _reduce(outputs, reduction, found[0].ranks)
    if not return_stats:
        return loss
    parts = [output.stats for output in outputs if output.stats is not None]
    return LossOutput(loss, TailStats(*(torch.cat(values) for values in zip(*parts, strict=True))))


def _small(
    z_i: Tensor, z_j: Tensor | None, link: Link, reduction: Reduction, return_stats: bool
) -> tuple[Tensor, TailStats | None] | None:
    """WEINCE by the kernels for small batches of two views; None where they are not for it."""
    if not isinstance(link, WeinceLink) or not isinstance(z_i, Tensor) or not z_i.is_cuda or z_j is None:
        return None
    if why_no_kernels(z_i.device) is not None:
        return None
    from weince.engines.small import serves, small_loss  # here, since Triton is an extra

    if not serves(z_i, z_j, link):
        return None
    return small_loss(z_i, z_j, link, mean=reduction == "mean", return_stats=return_stats)


def info_nce_loss(
    z_i: Tensor, z_j: Tensor | None = None, *, temperature: Scalar = 0.5, **options: Unpack[LossOptions]
) -> Tensor | LossOutput:
    """InfoNCE (NT-Xent): the softmax link ``s / temperature``."""
    return link_loss(z_i, z_j, link=SoftmaxLink(temperature), **options)


def weibit_loss(
    z_i: Tensor,
    z_j: Tensor | None = None,
    *,
    beta: Scalar = 1.0,
    endpoint: float = 1.0,
    **options: Unpack[LossOptions],
) -> Tensor | LossOutput:
    """The shortfall link ``-beta * log(endpoint - s)`` alone."""
    return link_loss(z_i, z_j, link=ShortfallLink(beta, endpoint), **options)


def power_loss(
    z_i: Tensor, z_j: Tensor | None = None, *, alpha: Scalar = 1.0, **options: Unpack[LossOptions]
) -> Tensor | LossOutput:
    """The power link ``alpha * log((1 + s) / 2)`` alone."""
    return link_loss(z_i, z_j, link=PowerLink(alpha), **options)


def blend_loss(
    z_i: Tensor,
    z_j: Tensor | None = None,
    *,
    lam: Scalar,
    beta: Scalar,
    temperature: Scalar = 0.5,
    **options: Unpack[LossOptions],
) -> Tensor | LossOutput:
    """The blend of WEINCE with given ``lam`` and ``beta``, numbers or ``(anchors,)`` tensors."""
    return link_loss(z_i, z_j, link=BlendLink(lam, beta, temperature), **options)


def weince_loss(
    z_i: Tensor,
    z_j: Tensor | None = None,
    *,
    temperature: Scalar = 0.5,
    tail: TailConfig = TailConfig(),
    **options: Unpack[LossOptions],
) -> Tensor | LossOutput:
    """WEINCE, Algorithm 1: the blend with ``lam`` and ``beta`` of each anchor from the tail of its negatives."""
    return link_loss(z_i, z_j, link=WeinceLink(temperature, tail), **options)


def tail_stats(similarities: Tensor, positives: Tensor, *, tail: TailConfig = TailConfig()) -> TailStats:
    """Tail statistics of a matrix of cosines.

    Args:
        similarities: ``(anchors, candidates)`` cosines.
        positives: ``(anchors,)`` column of each anchor's positive, or an ``(anchors, candidates)`` mask of all
            pairs that are not negatives: positives, the anchor itself, ignored pairs.
        tail: How to fit and gate.
    """
    shape = tuple(similarities.shape)
    if similarities.ndim != 2 or not similarities.is_floating_point() or shape[1] < 2:
        raise ValueError(
            "similarities must be a floating point tensor (anchors, candidates) with 2 candidates or more; "
            f"got {similarities.dtype} of shape {shape}"
        )
    if positives.dtype == torch.bool and tuple(positives.shape) == shape:
        left_out = positives
    elif positives.dtype in (torch.int32, torch.int64) and tuple(positives.shape) == shape[:1]:
        left_out = torch.zeros(shape, dtype=torch.bool, device=similarities.device)
        left_out.scatter_(1, positives.long().unsqueeze(1), True)
    else:
        raise ValueError(
            f"positives must be integers of shape ({shape[0]},) or a boolean mask of shape {shape}; "
            f"got {positives.dtype} of shape {tuple(positives.shape)}"
        )
    dtype = torch.float64 if similarities.dtype == torch.float64 else torch.float32
    shortfall = (1 - similarities.detach().to(dtype)).masked_fill(left_out, torch.inf)
    hardest = shortfall.topk(tail.tail_size(shape[1]), dim=1, largest=False).values
    fit = fit_tail(hardest, tail.tail_sizes(left_out.logical_not().sum(1)), tail)
    return gated(hardest[:, 0], fit, tail)


def _reduce(outputs: Sequence[EngineOutput], reduction: Reduction, ranks: Ranks | None) -> Tensor:
    """One number per anchor, or one for all. Over several ranks it is their average that means something."""
    losses = torch.cat([output.loss for output in outputs])
    if reduction == "none":
        return losses
    total = losses.sum() if ranks is None else losses.sum() * ranks.count
    if reduction == "sum":
        return total
    counted = [output.counted for output in outputs if output.counted is not None]
    if counted:
        number = torch.cat(counted).sum()
        return total / (number if ranks is None else ranks.sum(number)).clamp_min(1)
    return losses.mean() if ranks is None else total / (sum(ranks.anchors) * len(outputs))
