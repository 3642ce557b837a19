"""One training step: embed each sentence twice, or both sentences of each pair; then loss, gradient and update.

For a small encoder, CPU launch overhead dominates. As a CUDA graph, a step only copies the next word pieces and
starts one replay.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from weince.lab.tasks.sentences.encoder import SentenceEncoder, Tokens
from weince.lab.training.capture import EAGER_STEPS, Embedded, run_aside
from weince.losses import InfoNCELoss
from weince.tail import TailConfig, TailStats

Precision = Literal["fp32", "tf32", "bf16"]


class Step:
    """A callable that trains on one batch.

    Args:
        encoder: The encoder to train.
        loss: Loss of the two views of a batch; its own parameters are trained too.
        lr: Learning rate of AdamW, which :func:`weince.lab.training.capture.set_rate` changes.
        clip: Largest norm of the encoder's gradient.
        precision: Precision of the encoder.
        graph: Shape ``(sentences, length)`` of the batches to run as a CUDA graph; other batches run eagerly.
        pairs: A batch holds the first and then the second sentences of pairs, and each goes through the encoder once.
    """

    def __init__(
        self,
        encoder: SentenceEncoder,
        loss: nn.Module,
        *,
        lr: float,
        clip: float,
        precision: Precision,
        graph: tuple[int, int] | None = None,
        pairs: bool = False,
    ) -> None:
        self.views = 1 if pairs else 2  # views of each sentence
        self.encoder, self.loss, self.clip, self.precision = encoder, loss, clip, precision
        self.device = next(encoder.parameters()).device
        if graph is not None and self.device.type != "cuda":
            raise ValueError(f"a CUDA graph needs a CUDA device; got {self.device}")
        self.shape = graph
        self.optimizer = torch.optim.AdamW(
            [*encoder.parameters(), *loss.parameters()],
            lr=lr if graph is None else torch.tensor(lr, device=self.device),
            weight_decay=0.0,
            fused=self.device.type == "cuda",
            capturable=graph is not None,
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.place: Tokens | None = None  # the input buffers of the graph
        self.eager = 0
        self.last: Embedded | None = None

    def __call__(self, tokens: Tokens, ids: Tensor | None) -> Embedded:
        """Train on a batch: word pieces ``(n, length)``, and ids ``(n,)`` if some sentences are equal.

        The next step may overwrite the returned tensors.
        """
        if ids is not None or tokens.input_ids.shape != self.shape:
            return self._run(Tokens(*(part.to(self.device, non_blocking=True) for part in tokens)), ids)
        if self.place is None:
            self.place = Tokens(*(part.to(self.device) for part in tokens))
        for place, part in zip(self.place, tokens, strict=True):
            place.copy_(part, non_blocking=True)
        if self.graph is None and self.eager == EAGER_STEPS:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.last = self._run(self.place, None)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.last = run_aside(partial(self._run, self.place, None))
            self.eager += 1
        assert self.last is not None
        return self.last

    def _run(self, tokens: Tokens, ids: Tensor | None) -> Embedded:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            z_i, z_j = self.encoder(Tokens(*(part.repeat(self.views, 1) for part in tokens))).chunk(2)
        loss = self.loss(z_i, z_j, ids=ids)
        assert isinstance(loss, Tensor)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.encoder.parameters(), self.clip)
        self.optimizer.step()
        return Embedded(z_i.detach(), z_j.detach(), loss.detach())


@torch.no_grad()
def tail_stats(loss: nn.Module, embedded: Embedded, ids: Tensor | None) -> TailStats:
    """Tail statistics of a batch's anchors ``(n,)``, with the tail settings of the loss, or else the paper's."""
    z_i, z_j, _ = embedded
    measured = InfoNCELoss(candidates="cross", engine="dense", check_finite=False)
    measured.tail = getattr(loss, "tail", None) or TailConfig()
    return measured(z_i, z_j, ids=ids, return_stats=True).stats


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Allow TF32 in float32 matrix products if ``precision`` is ``tf32``, else forbid it; restored afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
