"""A queue of embeddings of earlier batches: the negatives of MoCo, the memory of cross-batch memory."""

from typing import Any

import torch
from torch import Tensor, nn

from weince.distributed import gather_rows, is_spread
from weince.pairs import NO_ID


class Queue(nn.Module):
    """The newest ``size`` rows that were pushed, with their ids, as further negatives of a loss.

    Ids mark rows of the same item, which are never negatives of each other; labels of a labelled set may take their
    place. Rows carry no gradient. The rows are part of the state dict.

    Args:
        size: The most rows to hold.
        gather: Over several ranks, push the rows of all ranks, so that every rank holds the same ones; the loss then
            wants ``gather=False``, or it would see each row once for every rank.

    Examples:
        >>> import torch
        >>> from weince import InfoNCELoss, Queue
        >>> queue, loss = Queue(6), InfoNCELoss(0.2, candidates="cross", gather=False)
        >>> for batch in range(3):
        ...     query, key, ids = torch.randn(4, 8), torch.randn(4, 8), torch.arange(4)
        ...     value = loss(query, key, negatives=queue.rows, ids=queue.ids_with(ids))
        ...     queue.push(key, ids)
        >>> queue.rows.shape, queue.ids.tolist()
        (torch.Size([6, 8]), [2, 3, 0, 1, 2, 3])
    """

    kept_rows: Tensor
    kept_ids: Tensor

    def __init__(self, size: int, *, gather: bool = True) -> None:
        super().__init__()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be an int of at least 1; got {size!r}")
        if not isinstance(gather, bool):
            raise ValueError(f"gather must be True or False; got {gather!r}")
        self.size, self.gather = size, gather
        self.register_buffer("kept_rows", torch.zeros(0, 0))
        self.register_buffer("kept_ids", torch.zeros(0, dtype=torch.int64))

    @property
    def rows(self) -> Tensor | None:
        """``(m, d)``, the oldest first; None before the first push."""
        return self.kept_rows if len(self.kept_rows) else None

    @property
    def ids(self) -> Tensor:
        """``(m,)`` ids of the rows; those that were pushed without one equal no other id."""
        return self.kept_ids

    def ids_with(self, ids: Tensor) -> Tensor:
        """``(n + m,)`` ids of a batch ``(n,)`` and of the rows, as a loss takes them with ``negatives``."""
        return torch.cat([ids, self.kept_ids.to(ids.device)])

    def __len__(self) -> int:
        return len(self.kept_rows)

    @torch.no_grad()
    def push(self, rows: Tensor, ids: Tensor | None = None) -> None:
        """Add rows, after the loss has seen them; the oldest make room.

        Args:
            rows: ``(n, d)`` embeddings.
            ids: ``(n,)`` integers.
        """
        if rows.ndim != 2 or not rows.is_floating_point():
            raise ValueError(f"rows must be floating point rows (n, d); got {rows.dtype} {tuple(rows.shape)}")
        if len(self) and rows.shape[1] != self.kept_rows.shape[1]:
            raise ValueError(
                f"rows must have the width {self.kept_rows.shape[1]} of those before; got {tuple(rows.shape)}"
            )
        if ids is None:
            ids = torch.full((len(rows),), NO_ID, dtype=torch.int64, device=rows.device)
        if ids.shape != (len(rows),) or ids.is_floating_point():
            raise ValueError(
                f"ids must be integers of shape ({len(rows)},); got {ids.dtype} {tuple(ids.shape)}"
            )
        rows, ids = rows.detach(), ids.to(rows.device, torch.int64)
        if self.gather and is_spread():
            rows, ids = gather_rows(rows), gather_rows(ids)
        held = self.kept_rows.to(rows) if len(self) else rows[:0]
        self.kept_rows = torch.cat([held, rows])[-self.size :].clone()
        self.kept_ids = torch.cat([self.kept_ids.to(ids), ids])[-self.size :].clone()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # The number of rows differs from that of an empty queue.
        for name in ("kept_rows", "kept_ids"):
            if prefix + name in state_dict:
                setattr(
                    self, name, torch.empty_like(state_dict[prefix + name], device=getattr(self, name).device)
                )
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        return f"size={self.size}, gather={self.gather}, rows={len(self)}"
