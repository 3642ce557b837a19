"""One batch over several processes: local anchors against the candidates of all ranks.

The convention, for ``reduction="mean"`` and ``"sum"``: **the average of the ranks' losses is what one process
would return on the whole batch, and the average of the ranks' parameter gradients is its gradient.**
``DistributedDataParallel`` averages gradients, so do not multiply anything by the number of ranks, even if local
batches differ in size. ``reduction="none"`` returns the unscaled losses of the local anchors.

Why it holds: a rank's loss is ``ranks / anchors of all ranks`` times the sum over its own anchors, and the
gradient of a gathered candidate goes back to the rank that owns it, summed over all ranks.

Exchanging the sizes of local batches costs one device sync per problem.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weince.pairs import Problem

Gather = bool | Literal["ring"]


def check_gather(gather: Gather, engine: str) -> None:
    """Raise if ``gather`` is invalid, or does not go with the engine."""
    if not isinstance(gather, bool) and gather != "ring":
        raise ValueError(f'gather must be True, False or "ring"; got {gather!r}')
    if gather == "ring" and engine != "auto":
        raise ValueError(f'gather="ring" is an engine of its own and goes with engine="auto"; got {engine!r}')


def is_spread() -> bool:
    """Whether there is a process group with several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a problem.

    Args:
        rank: Rank of this process.
        anchors: Number of anchors of each rank.
        candidates: Number of candidates of each rank.
    """

    rank: int
    anchors: tuple[int, ...]
    candidates: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.anchors)

    def gather(self, values: Tensor) -> Tensor:
        """Gather one value per anchor, ``(local anchors,)`` to ``(anchors of all ranks,)``; no gradient."""
        return _gathered(values, self.anchors)

    def gather_linked(self, values: Tensor) -> Tensor:
        """Like :meth:`gather`; each value's gradient returns to its owner, summed over the ranks."""
        gathered: Tensor = _GatherRows.apply(values, self.anchors, self.rank)  # type: ignore[no-untyped-call]
        return gathered

    def gather_candidates(self, values: Tensor) -> Tensor:
        """Gather one value per candidate, ``(local candidates,)`` to ``(candidates of all ranks,)``; no gradient."""
        return _gathered(values, self.candidates)

    def smallest(self, values: Tensor, count: int) -> Tensor:
        """``(count,)`` smallest values of all ranks in ascending order; each rank passes at most ``count``."""
        padded = values.new_full((count,), torch.inf)
        padded[: len(values)] = values
        return _gathered(padded, (count,) * self.count).topk(count, largest=False).values

    def sum(self, number: Tensor) -> Tensor:
        """Sum of a number over the ranks."""
        total = number.clone()
        with _together("adding up a number"):
            dist.all_reduce(total)
        return total

    def pass_on(self, travellers: Sequence[Tensor], owner: int) -> Coming:
        """Send tensors with a row per candidate of ``owner`` to the next rank; receive those of the previous rank."""
        after, before = (self.rank + 1) % self.count, (self.rank - 1) % self.count
        length = self.candidates[(owner - 1) % self.count]
        arriving = [sent.new_empty(length, *sent.shape[1:]) for sent in travellers]
        exchanges = [dist.P2POp(dist.isend, sent, after) for sent in travellers]
        exchanges += [dist.P2POp(dist.irecv, new, before) for new in arriving]
        with _together("passing candidates on"):
            return Coming(arriving, dist.batch_isend_irecv(exchanges))


class Coming(NamedTuple):
    """Tensors that are being received from another rank."""

    tensors: list[Tensor]
    exchanges: Sequence[Any]

    def wait(self) -> list[Tensor]:
        with _together("passing candidates on"):
            for exchange in self.exchanges:
                exchange.wait()
        return self.tensors


def meet(problem: Problem, settings: str, learned: Sequence[Tensor] = ()) -> Problem:
    """The local problem with ``ranks`` set, for ``gather="ring"``.

    Args:
        problem: Problem of the local anchors and candidates.
        settings: The loss as text; it must be the same on all ranks.
        learned: Its learned parameters; their values must be the same on all ranks, too.
    """
    ranks = _introduce(problem, settings, learned)
    return replace(problem, of_anchor=_ignore_wide(problem.of_anchor, ranks), ranks=ranks)


def average(gradient: Tensor) -> Tensor:
    """Average a gradient over all ranks, as DDP does for a model; for the parameters of a loss."""
    total = gradient.clone()
    with _together("averaging a gradient"):
        dist.all_reduce(total)
    return total / dist.get_world_size()


def share(problem: Problem, settings: str, learned: Sequence[Tensor] = ()) -> Problem:
    """The problem of the local anchors against the candidates of all ranks, in rank order.

    Args:
        problem: Problem of the local anchors and candidates.
        settings: The loss as text; it must be the same on all ranks.
        learned: Its learned parameters; their values must be the same on all ranks, too.
    """
    ranks = _introduce(problem, settings, learned)
    of_candidate = _placed(problem.of_candidate, ranks)

    rows: Tensor = _GatherRows.apply(problem.candidates, ranks.candidates, ranks.rank)  # type: ignore[no-untyped-call]
    return replace(
        problem,
        candidates=rows,
        of_anchor=_ignore_wide(_placed(problem.of_anchor, ranks), ranks),
        of_candidate={name: _gathered(values, ranks.candidates) for name, values in of_candidate.items()},
        ranks=ranks,
        raw=None,
        symmetric=False,
    )


def _placed(columns: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Columns whose rows are numbered over the candidates of all ranks."""
    start = sum(ranks.candidates[: ranks.rank])
    placed = dict(columns)
    for name in ("position", "positive"):
        if name in placed:
            placed[name] = placed[name] + start
    return placed


def _ignore_wide(columns: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Columns whose ``ignore`` covers the candidates of all ranks: what a rank marks among its own rows leaves those
    of other ranks alone."""
    if "ignore" not in columns or columns["ignore"].shape[1] == sum(ranks.candidates):
        return dict(columns)
    ignore, width = columns["ignore"], ranks.candidates[ranks.rank]
    if ignore.shape[1] != width:
        raise ValueError(
            f"ignore must have a column for each of the {width} candidates of this rank, or for each of the "
            f"{sum(ranks.candidates)} candidates of all ranks in their order; got shape {tuple(ignore.shape)}"
        )
    start = sum(ranks.candidates[: ranks.rank])
    wide = ignore.new_zeros(len(ignore), sum(ranks.candidates))
    wide[:, start : start + width] = ignore
    return {**columns, "ignore": wide}


def _introduce(problem: Problem, settings: str, learned: Sequence[Tensor]) -> Ranks:
    """Exchange the numbers of rows between ranks; raise if the ranks compute different losses."""
    rows = problem.anchors
    roles = ", ".join(sorted({*problem.of_anchor, *problem.of_candidate}))
    alike = {
        "width of the embeddings": rows.shape[1],
        "precision in bits": 8 * rows.element_size(),
        "roles of pairs": zlib.crc32(roles.encode()),
        "loss": zlib.crc32(settings.encode()),
        "learned parameters": 0,
    }
    mine = torch.tensor([len(rows), len(problem.candidates), *alike.values()], device=rows.device)
    if learned:
        mine[-1] = _fingerprint(learned)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with _together("exchanging the sizes of their batches"):
        dist.all_gather(every, mine)
    anchors, candidates, *others = torch.stack(every).T.tolist()
    # All ranks raise the same error, so that none waits for another. One row per rank suffices for negatives.
    if 0 in anchors:
        raise ValueError(
            f"wanted at least one row on every rank; got none on rank {anchors.index(0)} of {len(anchors)}"
        )
    for name, values in zip(alike, others, strict=True):
        if len(set(values)) > 1 and name == "learned parameters":
            raise ValueError(
                "wanted the same learned parameters of the loss on all ranks; got different values, since nothing "
                "averages their gradients: wrap the loss in DistributedDataParallel, like the model"
            )
        if len(set(values)) > 1:
            got = {"loss": settings, "roles of pairs": roles}.get(name)
            got = str(values) if got is None else f"{got} on this one, another on some"
            raise ValueError(f"wanted the same {name} on all ranks; got {got}")
    return Ranks(dist.get_rank(), tuple(anchors), tuple(candidates))


def _fingerprint(parameters: Sequence[Tensor]) -> Tensor:
    """A number of the bits of some parameters, without a device sync."""
    total = torch.zeros((), dtype=torch.int64, device=parameters[0].device)
    for place, parameter in enumerate(parameters):
        bits = parameter.detach().float().reshape(-1).view(torch.int32).long()
        weights = torch.arange(1, len(bits) + 1, device=bits.device)
        total = total * 31 + (bits * weights).sum() + place
    return total


def gather_rows(local: Tensor) -> Tensor:
    """Rows of all ranks, which may hold different numbers of them; no gradient."""
    mine = torch.tensor([len(local)], device=local.device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with _together("exchanging the sizes of their batches"):
        dist.all_gather(every, mine)
    return _gathered(local, tuple(torch.cat(every).tolist()))


def _gathered(local: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Rows of all ranks; ``lengths`` holds the number of rows of each."""
    if local.dtype == torch.bool:
        return _gathered(local.byte(), lengths).bool()
    padded = _padded(local.contiguous(), max(lengths))
    every = [torch.empty_like(padded) for _ in lengths]
    with _together("gathering rows"):
        dist.all_gather(every, padded)
    return torch.cat([rows[:length] for rows, length in zip(every, lengths, strict=True)])


def _padded(rows: Tensor, length: int) -> Tensor:
    if len(rows) == length:
        return rows
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


@contextmanager
def _together(doing: str) -> Iterator[None]:
    """Explain an error of a collective operation: another rank is gone."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError too, but of this rank
        raise
    except RuntimeError as error:
        rank, count = dist.get_rank(), dist.get_world_size()
        raise RuntimeError(
            f"weince: rank {rank} of {count} was left alone while {doing}: another rank failed, ended or did not "
            f"come within the process group's timeout; its own log says why ({error})"
        ) from error


class _GatherRows(torch.autograd.Function):
    """Rows of all ranks; the gradient of each row returns to its owner, summed over the ranks."""

    @staticmethod
    def forward(local: Tensor, lengths: tuple[int, ...], rank: int) -> Tensor:
        return _gathered(local, lengths)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[int, ...], int], output: Tensor) -> None:
        _, ctx.lengths, ctx.rank = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        lengths = ctx.lengths
        parts = [_padded(part, max(lengths)).contiguous() for part in torch.split(grad, lengths)]
        mine = torch.empty_like(parts[0])
        with _together("returning the gradients of gathered rows"):
            dist.reduce_scatter(mine, parts)
        return mine[: lengths[ctx.rank]], None, None
