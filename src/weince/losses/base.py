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
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict, Unpack, get_args, overload

import torch
from torch import Tensor, nn

from weince.distributed import Gather, Ranks, check_gather, is_spread, meet, share
from weince.engines.base import Engine, Need
from weince.engines.choose import Choice, EngineName, choose, out_of_memory, start, warn_once
from weince.layouts import Candidates, Layout, problems
from weince.links import Link
from weince.losses.replay import replayed
from weince.pairs import Problem
from weince.parameters import check_choice
from weince.scores import no_autocast
from weince.sums import LogSumExp, Sum, Summed
from weince.tail import TailConfig, TailStats

Reduction = Literal["mean", "sum", "none"]


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


SUMS = get_args(Sum)  # torch 2.6 cannot compile a check against a union


class Options(TypedDict, total=False):
    """Options of every loss; see :class:`ContrastiveLoss`."""

    candidates: Candidates
    reduction: Reduction
    engine: EngineName
    gather: Gather
    check_finite: bool | None
    graph: bool | None


class ContrastiveLoss(nn.Module):
    """A contrastive loss: it combines sums over an anchor's candidates into one number per anchor.

    Args:
        candidates: ``"views"`` (SimCLR), ``"cross"`` (SimCSE, query and key), ``"clip"`` or ``"labels"`` (SupCon),
            see :func:`weince.pairs.problems`.
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
    """Whether the loss is defined for several positives per anchor, ``candidates="labels"``."""

    needs_negatives: ClassVar[bool] = True
    """If True, an anchor without negatives for a :class:`weince.LogSumExp` has loss 0. If False, and with other sums,
    its loss is what :meth:`combine` returns."""

    same_view: ClassVar[bool] = False
    """Whether the loss contrasts within a view, and so needs ``candidates="views"``."""

    per_anchor: ClassVar[bool] = True
    """Whether an anchor's loss depends on its own sums alone. If False, :meth:`combine` also gets ``gather=``, a
    function that maps one number per local anchor to the numbers of all ranks' anchors and passes gradients back."""

    tail: TailConfig | None = None
    """How to compute the tail statistics, which :meth:`sums` gets as ``batch.stats``; None if it needs none."""

    hardest: tuple[int, ...] = ()
    """Each ``hardest`` that the sums use; one survey then finds these negatives together with the tail."""

    search_space: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """The tries of ``weince compare``: arguments of the loss by name, the most promising first."""

    _looked = False  # whether _look has checked a batch with labels, ids or ignore

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__()
        self._check_known(options)
        self.candidates: Candidates = options.get("candidates", "views")
        self.reduction: Reduction = options.get("reduction", "mean")
        self.engine: EngineName = options.get("engine", "auto")
        self.gather: Gather = options.get("gather", True)
        self.check_finite = options.get("check_finite")
        self.graph = options.get("graph")
        check_choice("candidates", self.candidates, get_args(Candidates))
        check_choice("reduction", self.reduction, get_args(Reduction))
        check_choice("engine", self.engine, get_args(EngineName))
        check_gather(self.gather, self.engine)
        for option in ("check_finite", "graph"):
            if getattr(self, option) not in (None, True, False):  # "no" would be taken for True
                raise ValueError(f"{option} must be True, False or None; got {getattr(self, option)!r}")
        name = type(self).__name__
        if self.candidates == "labels" and not self.several_positives:
            raise ValueError(f'{name} wants one positive per anchor; got candidates="labels"')
        if self.candidates != "views" and self.same_view:
            raise ValueError(
                f'{name} contrasts within a view and wants candidates="views"; got {self.candidates!r}'
            )

    def _check_known(self, options: Options) -> None:
        for name in options:
            if name not in Options.__annotations__:
                takes = ", ".join([*_parameters(type(self)), *Options.__annotations__])
                raise TypeError(f"{type(self).__name__} has no option {name!r}; it takes {takes}")

    def sums(self, batch: Engine) -> Sum | Sequence[Sum]:
        """The sums to compute over the candidates of every anchor.

        Args:
            batch: The engine of this batch. ``batch.stats`` holds the tail statistics if :attr:`tail` is set.
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
            **roles: Tensor | None,
        ) -> LossOutput: ...

        @overload
        def __call__(
            self,
            z_i: Tensor,
            z_j: Tensor | None = None,
            *,
            return_stats: Literal[False] = False,
            **roles: Tensor | None,
        ) -> Tensor: ...

        def __call__(self, *inputs: Any, **roles: Any) -> Any: ...

    def forward(
        self,
        z_i: Tensor,
        z_j: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        negatives: Tensor | None = None,
        ids: Tensor | None = None,
        ignore: Tensor | None = None,
        return_stats: bool = False,
    ) -> Tensor | LossOutput:
        """The loss of a batch.

        Args:
            z_i: ``(n, d)`` embeddings of any floating dtype; they need not be normalised.
            z_j: ``(n, d)``, positives row by row. Optional with ``candidates="labels"``.
            labels: ``(n,)`` integers, for ``candidates="labels"``.
            negatives: ``(m, d)`` further negatives of every anchor, for ``candidates="cross"``.
            ids: ``(n,)`` integers (with ``negatives`` also ``(n + m,)``); rows with equal ids are never negatives
                of each other.
            ignore: ``(anchors, candidates)`` booleans, True for pairs that are not negatives.
            return_stats: Return a :class:`LossOutput` with the tail statistics of each anchor.
        """
        given = {
            "z_i": z_i,
            "z_j": z_j,
            "labels": labels,
            "negatives": negatives,
            "ids": ids,
            "ignore": ignore,
        }
        batch = {name: value for name, value in given.items() if value is not None}
        if not return_stats and self._may_replay():
            value = replayed(self, self._compute, batch, asked=self.graph is True)
            if value is not None:
                return value
        computed: Tensor | LossOutput = self._compute(batch, return_stats)
        return computed

    def _may_replay(self) -> bool:
        """Whether this loss may be replayed from CUDA graphs."""
        if torch.compiler.is_compiling() or self.graph is False or self.check_finite:
            return False
        return (self.graph or self._is_ours()) and self.engine in ("auto", "fused") and not self._spread()

    def _is_ours(self) -> bool:
        """Whether all code of this loss is in this library. Other code may run Python that no CUDA graph repeats."""
        return type(self).__module__.startswith("weince.losses.")

    def _spread(self) -> bool:
        """Whether candidates of other ranks take part."""
        return bool(self.gather) and is_spread()

    def _compute(self, batch: Mapping[str, Tensor], return_stats: bool = False) -> Any:
        """The loss of a batch; a :class:`LossOutput` if statistics are requested."""
        spread = self._spread()
        found = problems(
            Layout(self.candidates, check_finite=self.check_finite, views=self.same_view),
            **batch,
            alone=not spread,
        )
        need = Need(self.tail or (TailConfig() if return_stats else None), self.hardest)
        if spread:
            join = meet if self.gather == "ring" else share
            found = [join(problem, self._described(need)) for problem in found]
        results = [self._contrast(problem, need) for problem in found]
        loss = self._reduce(results, found[0].ranks)
        self._look(loss, [name for name in batch if name in ("labels", "ids", "ignore")])
        if not return_stats:
            return loss
        stats = [result.stats for result in results if result.stats is not None]
        return LossOutput(loss, TailStats(*(torch.cat(values) for values in zip(*stats, strict=True))))

    def _contrast(self, problem: Problem, need: Need) -> "_Result":
        """Losses of one problem, computed by the chosen engine."""
        ring = self.gather == "ring" and problem.ranks is not None
        choice = choose(problem, need, engine=self.engine, ring=ring)
        # No retry with several ranks: the others would not repeat the exchanges that this one starts again.
        may_retry = self.engine == "auto" and choice.name == "dense" and problem.ranks is None
        if not may_retry or torch.compiler.is_compiling():
            return self._losses(start(problem, need, choice))
        before = [buffer.clone() for buffer in self.buffers()]
        try:
            return self._losses(start(problem, need, choice))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        # Outside the except block, where the memory of the dense engine is already free.
        for buffer, value in zip(self.buffers(), before, strict=True):
            buffer.copy_(value)
        warn_once("weince: out of memory in the dense engine; the chunked engine is used instead")
        return self._losses(start(problem, need, Choice("chunked", "the dense engine ran out of memory")))

    def _losses(self, engine: Engine) -> "_Result":
        combine: Callable[..., Tensor] = self.combine
        if not self.per_anchor:
            ranks = engine.problem.ranks
            combine = partial(combine, gather=_as_they_are if ranks is None else ranks.gather_linked)
        with no_autocast(engine.problem.anchors.device):
            found = engine.sums(self._asked(engine))
            losses = combine(*found)
            self._check_losses(losses, len(engine.problem.anchors), found)
        if self.needs_negatives and engine.alone is not None:
            losses = losses.masked_fill(engine.alone, 0)
        if engine.counted is not None:
            losses = losses.masked_fill(~engine.counted, 0)
        return _Result(losses, engine.counted, engine.surveyed)

    def _asked(self, engine: Engine) -> list[Sum]:
        """The sums of the loss, checked: a user may have written it."""
        found = self.sums(engine)
        asked = list(found) if isinstance(found, Sequence) else [found]
        for one in asked:
            if not isinstance(one, SUMS):
                raise TypeError(
                    "sums must return a LogSumExp, a SoftplusSum or a Count, or a list of them; "
                    f"got {type(one).__name__}"
                )
            if isinstance(one, LogSumExp) and one.same_view and not self.same_view:
                raise ValueError(
                    "LogSumExp(..., same_view=True) wants same_view = True in the class of the loss; "
                    f"got none in {type(self).__name__}"
                )
        return asked

    def _check_losses(self, losses: Any, anchors: int, sums: Sequence[Summed | Tensor]) -> None:
        """Raise unless ``combine`` returned one loss per anchor, with the gradient of its sums."""
        if not isinstance(losses, Tensor) or losses.shape != (anchors,):  # other shapes would broadcast
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"combine must return one loss per anchor, ({anchors},), and leave their mean to reduction; got {got}"
            )
        has_gradient = any((one if isinstance(one, Tensor) else one.value).requires_grad for one in sums)
        if has_gradient and not losses.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"combine of {type(self).__name__} must return losses with a gradient; got detached ones: leave out "
                ".detach(), .item() and the like, or call the loss under torch.no_grad()"
            )

    def _reduce(self, results: Sequence["_Result"], ranks: Ranks | None) -> Tensor:
        """Apply ``reduction``. With several ranks, the loss of the whole batch is the average over the ranks."""
        # Every operation counts: for small batches on a GPU, CPU launch overhead dominates.
        losses = results[0].losses if len(results) == 1 else torch.cat([result.losses for result in results])
        if self.reduction == "none":
            return losses
        counted = [result.counted for result in results if result.counted is not None]
        if self.reduction == "mean" and ranks is None and not counted:
            return losses.mean()
        total = losses.sum() if ranks is None else losses.sum() * ranks.count
        if self.reduction == "sum":
            return total
        if self.reduction != "mean":  # set after the loss was made
            raise ValueError(f"reduction must be one of mean, sum, none; got {self.reduction!r}")
        if counted:
            number = torch.cat(counted).sum()
            return total / (number if ranks is None else ranks.sum(number)).clamp_min(1)
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

    def _described(self, need: Need) -> str:
        """The settings as text, which is the same on all ranks if they compute the same loss; it reads no tensor."""
        values = self.settings() | {"gather": self.gather, "tail": need.tail, "training": self.training}
        words = ", ".join(f"{name}={_in_words(value)}" for name, value in values.items())
        return f"{type(self).__name__}({words})"

    def settings(self) -> dict[str, Any]:
        """Arguments of the loss by name; learned ones have their current values."""
        own = [name for name in _parameters(type(self)) if hasattr(self, name)]
        return {name: getattr(self, name) for name in (*own, "candidates", "reduction")}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={_shown(value)}" for name, value in self.settings().items())


class _Result(NamedTuple):
    """Losses ``(anchors,)``; which of them count (None: all); tail statistics if requested."""

    losses: Tensor
    counted: Tensor | None
    stats: TailStats | None


def _as_they_are(values: Tensor) -> Tensor:
    return values


def _parameters(loss: type) -> list[str]:
    """Arguments of a loss by name, without ``self`` and its ``**options``, whatever a user's loss calls them."""
    found = signature(loss.__init__).parameters.values()  # type: ignore[misc]
    return [one.name for one in found if one.name != "self" and one.kind is not one.VAR_KEYWORD]


def _in_words(value: Any) -> str:
    """A setting as text, without what differs between processes: tensor values and addresses of functions."""
    if isinstance(value, Link):
        fixed = [f"{name}={_in_words(own)}" for name, own in vars(value).items()]
        return f"{type(value).__name__}({', '.join(fixed)})"
    plain = value is None or isinstance(value, int | float | str | tuple | TailConfig)
    return repr(value) if plain else type(value).__name__


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        has_value = value.numel() == 1 and not value.is_meta
        return f"{value.item():.4g}" if has_value else f"tensor{tuple(value.shape)}"
    return repr(value)


def functional(
    loss: type[ContrastiveLoss], name: str, example: str = "torch.randn(4, 8), torch.randn(4, 8)"
) -> Callable[..., Any]:
    """Make a function of a loss; it takes the options of the class and those of its call.

    Args:
        loss: The class.
        name: Name of the function.
        example: Arguments of the example in its docstring.
    """
    of_call = ("labels", "negatives", "ids", "ignore", "return_stats")

    def function(z_i: Tensor, z_j: Tensor | None = None, **options: Any) -> Any:
        roles = {name: options.pop(name) for name in of_call if name in options}
        made = loss(**options)
        made._looked = True  # each call has a new module, so that _look would cost a device sync every time
        made.graph = False  # this module is called only once
        return made(z_i, z_j, **roles)

    about = (loss.__doc__ or "").splitlines()[0]
    function.__doc__ = f"""{about} A function with the options of :class:`{loss.__name__}` and of its call.

    Each call makes a new loss. If yours learns or remembers something, such as a scale or WEINCE's running slope, use
    the class.

    Examples:
        >>> import torch
        >>> from weince import {name}
        >>> {name}({example}).shape
        torch.Size([])
    """
    function.__name__ = function.__qualname__ = name
    function.__module__ = loss.__module__  # where pickle looks for the name
    return function
