"""The base class of all losses: it lays out the candidates, chooses an engine and reduces the losses of the anchors.

To write a loss, define two methods: ``sums`` names sums over the candidates, ``combine`` turns them into losses.

>>> import torch
>>> from weince import ContrastiveLoss, LogSumExp
>>> class Mine(ContrastiveLoss):
...     def sums(self, batch):
...         return LogSumExp(lambda s: 10 * s - s**2)
...     def combine(self, lse):
...         return lse.value - lse.positive
>>> Mine()(torch.randn(8, 16), torch.randn(8, 16)).shape
torch.Size([])
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weince.distributed import Gather, Ranks, is_spread, meet, share
from weince.engines.choose import (
    ENGINE_OF,
    Choice,
    EngineName,
    choose,
    fused_engine,
    log,
    out_of_memory,
    warn_once,
)
from weince.layouts import Candidates, Layout, Limit, problems
from weince.losses.options import (
    DEFAULTS,
    Options,
    Reduction,
    Roles,
    check_names,
    check_options,
    check_roles,
    in_words,
    parameters_of,
    shown,
)
from weince.losses.replay import replayed
from weince.pairs import Problem, Score
from weince.scores import no_autocast
from weince.sums import Batch, LogSumExp, Need, Sum, Summed
from weince.tail import TailConfig, TailStats


class LossOutput(NamedTuple):
    """A loss and the tail statistics of its anchors: ``loss`` is a tensor, ``stats`` a :class:`weince.TailStats`.

    Examples:
        >>> import torch
        >>> from weince import WeinceLoss
        >>> out = WeinceLoss()(torch.randn(8, 16), torch.randn(8, 16), return_stats=True)
        >>> out.loss.shape, out.stats.lam.shape
        (torch.Size([]), torch.Size([16]))
    """

    loss: Tensor
    stats: TailStats


class ContrastiveLoss(nn.Module):
    """A contrastive loss: it combines sums over an anchor's candidates into one number per anchor.

    Args:
        candidates: ``"views"`` (SimCLR), ``"cross"`` (SimCSE, query and key), ``"clip"`` or ``"labels"`` (SupCon),
            see :func:`weince.layouts.problems`.
        reduction: ``"mean"`` over anchors, ``"sum"``, or ``"none"`` for one value per anchor: ``(2 n,)`` with
            ``"views"`` and ``"clip"``, first ``z_i``, then ``z_j``. An anchor without a positive has loss 0.
        engine: ``"dense"`` keeps the matrix of scores, ``"chunked"`` needs memory linear in the batch, ``"fused"``
            runs CUDA kernels, ``"auto"`` chooses (:func:`weince.engines.choose` tells which one and why).
        gather: In a process group of several ranks, contrast the local anchors with the candidates of all ranks; the
            average of the ranks' losses and gradients is that of one process (:mod:`weince.distributed`). ``"ring"``
            passes candidates from rank to rank, so that no rank holds all of them.
        check_finite: Raise an error on NaN or infinity in the embeddings. By default only on a CPU, where the check
            needs no device sync.
        graph: On CUDA, record the forward and backward pass as CUDA graphs and replay them for later batches of the
            same shape; this removes most of the CPU launch overhead. Each thread records its own graphs. By default
            only for the losses of this library and up to 8,192 pairs of views. True: for any size and for your own
            loss too, which may then depend on no Python state that changes between batches except its attributes.
            False: never.
        within: With ``"cross"`` and ``"clip"``: the other rows of the anchor's own side are negatives, too.
        score: ``"cosine"``, or ``"dot"``: the product of rows as they are, for losses whose logits need no cap.
        ignore_above: Negatives that score more than this above the positive take no part, since they are probably
            positives; or a function from the positive's score to the largest score of a negative.
        exempt_hard: Whether ``ignore_above`` leaves the negatives alone that a call passes in.

    Examples:
        >>> import torch
        >>> from weince import ContrastiveLoss, LogSumExp
        >>> class Mine(ContrastiveLoss):
        ...     def sums(self, batch):
        ...         return LogSumExp(lambda s: 10 * s - s**2)
        ...     def combine(self, lse):
        ...         return lse.value - lse.positive
        >>> Mine(candidates="cross")(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    several_positives: ClassVar[bool] = True
    """Whether the loss is defined for several positives per anchor, ``candidates="labels"`` or ``labels=``."""

    needs_negatives: ClassVar[bool] = True
    """If True, an anchor without negatives for a :class:`weince.LogSumExp` has loss 0. If False, and with other sums,
    its loss is what :meth:`combine` returns."""

    same_view: ClassVar[bool] = False
    """Whether the loss contrasts within a view, and so needs ``candidates="views"``."""

    per_anchor: ClassVar[bool] = True
    """Whether an anchor's loss depends on its own sums alone. If False, :meth:`combine` also gets ``gather=``, a
    function that maps one number per local anchor to the numbers of all ranks' anchors and passes gradients back."""

    takes_offset: ClassVar[bool] = True
    """Whether an offset of the logits has a meaning for the loss."""

    takes_dot: ClassVar[bool] = True
    """Whether the loss has a meaning for scores of any size, ``score="dot"``."""

    ours: ClassVar[bool] = False
    """Whether all code of the class is in this library. Other code may run Python that no CUDA graph repeats."""

    options: ClassVar[type] = Options
    """The options that the loss takes beside its own arguments."""

    tail: TailConfig | None = None
    """How to compute the tail statistics, which :meth:`sums` gets as ``batch.stats``; None if it needs none."""

    hardest: tuple[int, ...] = ()
    """Each ``hardest`` that the sums use; one survey then finds these negatives together with the tail."""

    search_space: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """The tries of ``weince compare``: arguments of the loss by name, the most promising first."""

    candidates: Candidates
    reduction: Reduction
    engine: EngineName
    gather: Gather
    check_finite: bool | None
    graph: bool | None
    within: bool
    score: Score
    ignore_above: Limit | None
    exempt_hard: bool

    _looked = False  # whether _look has checked a batch with labels, ids or ignore

    def __init_subclass__(cls) -> None:
        cls.ours = vars(cls).get("ours", False)  # a subclass holds other code

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__()
        check_names(type(self), options, self.options.__annotations__)
        for name, value in {**DEFAULTS, **options}.items():
            setattr(self, name, value)
        check_options(self)

    def sums(self, batch: Batch) -> Sum | Sequence[Sum]:
        """The sums to compute over the candidates of every anchor.

        Args:
            batch: What is known of the batch: ``batch.positive_scores()``, ``batch.negatives()``, and, if
                :attr:`tail` is set, the tail statistics ``batch.stats``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define sums(batch), what it sums over candidates; got none"
        )

    def combine(self, *sums: Any, **of_batch: Any) -> Tensor:
        """Losses ``(anchors,)`` from the results of :meth:`sums`, in the same order; autograd differentiates this."""
        raise NotImplementedError(
            f"{type(self).__name__} must define combine(*sums), the loss of each anchor; got none"
        )

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            z_i: Tensor,
            z_j: Tensor | None = None,
            *,
            return_stats: Literal[True],
            **roles: Unpack[Roles],
        ) -> LossOutput: ...

        @overload
        def __call__(
            self,
            z_i: Tensor,
            z_j: Tensor | None = None,
            *,
            return_stats: Literal[False] = False,
            **roles: Unpack[Roles],
        ) -> Tensor: ...

        def __call__(self, *inputs: Any, **roles: Any) -> Any: ...

    def forward(
        self, z_i: Tensor, z_j: Tensor | None = None, *, return_stats: bool = False, **roles: Unpack[Roles]
    ) -> Tensor | LossOutput:
        """The loss of a batch.

        Args:
            z_i: ``(n, d)`` embeddings of any floating dtype; they need not be normalised.
            z_j: ``(n, d)``, positives row by row. Optional with ``candidates="labels"``.
            return_stats: Return a :class:`LossOutput` with the tail statistics of each anchor.
            **roles: What else the batch brings along:

                - ``labels``: ``(n,)`` integers, for ``candidates="labels"``; for ``"cross"`` and ``"clip"`` a pair,
                  those of the queries and those of the documents: documents with the query's label are positives.
                - ``negatives``, for ``"cross"`` and ``"clip"``: ``(m, d)`` further negatives of every query, or
                  ``(n, k, d)``, ``k`` negatives of each query that no other query sees.
                - ``ids``: ``(n,)`` integers (with ``negatives`` also ``(n + m,)`` or ``(n + n k,)``); rows with
                  equal ids are never negatives of each other.
                - ``ignore``: ``(anchors, candidates)`` booleans, True for pairs that are not negatives; over ranks,
                  candidates of this rank or those of all ranks in their order.
                - ``offset``, for ``"cross"`` and ``"clip"``: ``(n,)`` numbers (``(n + m,)`` with ``negatives``) added
                  to the logits of the documents, such as ``-log q`` for documents sampled with probability q.
                - ``weights``: ``(n,)`` weights of the anchors in the mean; both rows of a pair have the same.
        """
        batch = {"z_i": z_i} if z_j is None else {"z_i": z_i, "z_j": z_j}
        for name, value in roles.items():
            if value is not None:
                batch[name] = value  # type: ignore[assignment]
        if len(roles) > 0:
            check_roles(self, roles, len(z_i) if isinstance(z_i, Tensor) else 0)
        if not return_stats and isinstance(z_i, Tensor) and z_i.is_cuda and self._may_replay():
            value = replayed(self, self.computed, batch, asked=self.graph is True)
            if value is not None:
                return value
        computed: Tensor | LossOutput = self.computed(batch, return_stats)
        if len(roles) > 0:
            self._look(
                computed if isinstance(computed, Tensor) else computed.loss,
                [name for name in batch if name in ("labels", "ids", "ignore")],
            )
        return computed

    def _may_replay(self) -> bool:
        """Whether this loss may be replayed from CUDA graphs."""
        if torch.compiler.is_compiling() or self.graph is False or self.check_finite:
            return False
        spread = self.gather and is_spread()
        return (self.graph or self.repeats()) and self.engine in ("auto", "fused") and not spread

    def repeats(self) -> bool:
        """Whether the loss runs no Python that a CUDA graph would not repeat."""
        return self.ours

    def computed(self, batch: Mapping[str, Any], return_stats: bool = False) -> Any:
        """The loss of a batch of tensors by name; a :class:`LossOutput` if statistics are requested."""
        spread = self.gather and dist.is_available() and dist.is_initialized() and is_spread()
        roles = dict(batch)
        weights = roles.pop("weights", None)
        layout = Layout(
            self.candidates, self.within, self.score, self.ignore_above, self.exempt_hard, self.check_finite,
            self.same_view,
        )  # fmt: skip
        directions = problems(layout, **roles, alone=not spread)
        tail = TailConfig() if return_stats and self.tail is None else self.tail
        if len(self._parameters) > 0:
            self._check_parameters(directions[0].anchors.device)
        if tail is not None and self.score == "dot":
            raise ValueError('tail statistics want cosines, whose largest value is 1; got score="dot"')
        if spread:
            join = meet if self.gather == "ring" else share
            learned = [parameter for parameter in self.parameters() if parameter.requires_grad]
            directions = [join(problem, self._described(tail), learned) for problem in directions]
        results = []
        for problem in directions:
            results.append(self.contrast(problem, self.need(problem, tail)))
        loss = self._reduce(results, directions[0].ranks, weights)
        if not return_stats:
            return loss
        stats = [result.stats for result in results if result.stats is not None]
        return LossOutput(loss, TailStats(*(torch.cat(values) for values in zip(*stats, strict=True))))

    def _check_parameters(self, device: torch.device) -> None:
        """Raise unless the learned parameters are on the device of the embeddings."""
        for name, parameter in self._parameters.items():
            if parameter is not None and parameter.device != device:
                raise ValueError(
                    f"{name} must be on {device}, like the embeddings; got {parameter.device}: move the loss there "
                    f'with .to("{device}")'
                )

    def need(self, problem: Problem, tail: TailConfig | None) -> Need:
        """What the sums of a problem need to know of its negatives."""
        return Need(tail, self.hardest)

    def contrast(self, problem: Problem, need: Need) -> "_Result":
        """Losses of one problem, computed by the chosen engine."""
        ring = self.gather == "ring" and problem.ranks is not None
        choice = choose(problem, need, engine=self.engine, ring=ring)
        # No retry with several ranks: the others would not repeat the exchanges that this one starts again.
        may_retry = self.engine == "auto" and choice.name == "dense" and problem.ranks is None
        if not may_retry or torch.compiler.is_compiling():
            return self._begun(problem, need, choice)
        before = tuple(map(torch.clone, self.buffers()))
        try:
            return self._begun(problem, need, choice)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        # Outside the except block, where the memory of the dense engine is already free.
        for buffer, value in zip(self.buffers(), before, strict=True):
            buffer.copy_(value)
        warn_once("weince: out of memory in the dense engine; the chunked engine is used instead")
        return self._begun(problem, need, Choice("chunked", "the dense engine ran out of memory"))

    def _begun(self, problem: Problem, need: Need, choice: Choice) -> "_Result":
        if not torch.compiler.is_compiling():
            log.debug("engine %s: %s", *choice)
        with no_autocast(problem.anchors.device):
            return self._losses(Batch(problem, ENGINE_OF.get(choice.name) or fused_engine(), need))

    def _losses(self, batch: Batch) -> "_Result":
        """Losses of a batch; the caller has left autocast."""
        combine: Callable[..., Tensor] = self.combine
        if not self.per_anchor:
            ranks = batch.problem.ranks
            combine = partial(combine, gather=_as_they_are if ranks is None else ranks.gather_linked)
        results = batch.sums(self._asked(batch))
        losses = combine(*results)
        self._check_losses(losses, len(batch.problem.anchors), results)
        if self.needs_negatives and not batch.uniform:
            for result in results:
                if isinstance(result, Summed) and result.alone is not None:
                    losses = losses.masked_fill(result.alone, 0)
        counted = None if batch.positives is None else batch.positives > 0
        if counted is not None:
            losses = losses.masked_fill(~counted, 0)
        return _Result(losses, counted, batch.survey.stats)

    def _asked(self, batch: Batch) -> list[Sum]:
        """The sums of the loss, checked: a user may have written it."""
        asked = self.sums(batch)
        requests = list(asked) if isinstance(asked, Sequence) else [asked]
        for request in requests:
            if not isinstance(request, Sum):
                raise TypeError(
                    "sums must return a LogSumExp, a SoftplusSum or a Count, or a list of them; "
                    f"got {type(request).__name__}"
                )
            if isinstance(request, LogSumExp) and request.same_view and not self.same_view:
                raise ValueError(
                    "LogSumExp(..., same_view=True) wants same_view = True in the class of the loss; "
                    f"got {type(self).__name__} without it"
                )
        return requests

    def _check_losses(self, losses: Any, anchors: int, sums: Sequence[Summed | Tensor]) -> None:
        """Raise unless ``combine`` returned one loss per anchor, with the gradient of its sums."""
        if not isinstance(losses, Tensor) or losses.shape != (anchors,):  # other shapes would broadcast
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"combine must return one loss per anchor, ({anchors},), and leave their mean to reduction; got {got}"
            )
        if losses.requires_grad or not torch.is_grad_enabled():
            return
        if any((each if isinstance(each, Tensor) else each.value).requires_grad for each in sums):
            raise ValueError(
                f"combine of {type(self).__name__} must return losses with a gradient; got detached ones: leave out "
                ".detach(), .item() and the like, or call the loss under torch.no_grad()"
            )

    def _reduce(self, results: Sequence["_Result"], ranks: Ranks | None, weights: Tensor | None) -> Tensor:
        """Apply ``reduction``. With several ranks, the loss of the whole batch is the average over the ranks."""
        # Every operation counts: for small batches on a GPU, CPU launch overhead dominates.
        losses, taken = results[0].losses, results[0].counted
        if len(results) > 1:
            losses = torch.cat([result.losses for result in results])
            counted = [result.counted for result in results if result.counted is not None]
            taken = torch.cat(counted) if counted else None
        if weights is not None:
            weights = weights.detach().to(losses.dtype).repeat(len(losses) // len(weights))
            losses = losses * weights
            taken = weights if taken is None else weights * taken
        if self.reduction == "none":
            return losses
        if self.reduction == "mean" and ranks is None and taken is None:
            return losses.mean()
        total = losses.sum() if ranks is None else losses.sum() * ranks.count
        if self.reduction == "sum":
            return total
        if self.reduction != "mean":  # set after the loss was made
            raise ValueError(f"reduction must be one of mean, sum, none; got {self.reduction!r}")
        if taken is not None:
            number = taken.sum() if ranks is None else ranks.sum(taken.sum())
            return total / (number.clamp_min(1) if weights is None else number.where(number > 0, 1.0))
        assert ranks is not None
        return total / (sum(ranks.anchors) * len(results))

    def _look(self, loss: Tensor, roles: Sequence[str]) -> None:
        """Warn if the loss of the first batch is 0. Wrong labels show there, so later batches need no device sync."""
        # Compiled code must not depend on _looked. Fake and meta tensors have no value to read.
        if torch.compiler.is_compiling() or self._looked or loss.is_meta or type(loss) is not Tensor:
            return
        if not roles or (loss.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._looked = True
        if not loss.any():
            warn_once(
                f"weince: the loss of a batch is 0; it seems that its {' and '.join(roles)} "
                "leave no anchor a positive and a negative"
            )

    def _described(self, tail: TailConfig | None) -> str:
        """The settings as text, which is the same on all ranks if they compute the same loss; it reads no tensor."""
        values = {
            name: getattr(self, name) for name in ("within", "score", "ignore_above", "exempt_hard", "gather")
        }
        values |= {**self.settings(), "tail": tail, "training": self.training}
        words = ", ".join(f"{name}={in_words(value)}" for name, value in values.items())
        return f"{type(self).__name__}({words})"

    def settings(self) -> dict[str, Any]:
        """Arguments of the loss by name; learned ones have their current values."""
        own = [name for name in parameters_of(type(self)) if hasattr(self, name)]
        values = {name: getattr(self, name) for name in (*own, "candidates", "reduction")}
        for name in ("within", "score", "ignore_above", "exempt_hard"):
            if getattr(self, name) != DEFAULTS[name]:
                values[name] = getattr(self, name)
        return values

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={shown(value)}" for name, value in self.settings().items())


class _Result(NamedTuple):
    """Losses ``(anchors,)``; which of them count (None: all); tail statistics if requested."""

    losses: Tensor
    counted: Tensor | None
    stats: TailStats | None


def _as_they_are(values: Tensor) -> Tensor:
    return values
