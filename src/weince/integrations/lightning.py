"""A Lightning callback that logs statistics of the tail of the negatives during training.

    from weince.integrations.lightning import TailLogger

    Trainer(callbacks=[TailLogger(every_n_steps=50)]).fit(module)

It works with any ``LightningModule`` that holds a loss of weince as a submodule (``self.loss = WeinceLoss()``). For a
loss that does not use the tail, such as InfoNCE, it shows what WEINCE would see. It works with both
``lightning.pytorch`` and ``pytorch_lightning``.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weince.losses import ContrastiveLoss, LossOutput
from weince.scores import wide
from weince.tail import TailStats

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    try:
        try:
            from lightning.pytorch import Callback
        except ModuleNotFoundError:
            from pytorch_lightning import Callback
    except ModuleNotFoundError as error:
        raise ImportError(
            "weince.integrations.lightning needs Lightning: pip install lightning, or pytorch-lightning"
        ) from error

__all__ = ["TailLogger"]

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


class TailLogger(Callback):
    """Logs mean and quantiles of ``rho``, ``beta``, ``daic`` and ``lam`` over the anchors of a training batch.

    On every n-th training batch it asks the losses for these statistics. Losses that use them compute them anyway.
    Others, such as InfoNCE, compute them only for this purpose, which may change their value in the last digit.
    Other batches are not touched, and each logged batch costs one transfer from the device. With several devices, the
    statistics cover the anchors of the device that logs.

    The names are ``tail/lam_mean``, ``tail/lam_p10`` and so on; in a module with several losses
    ``tail/<name of the loss>/lam_mean``. They go to the trainer's loggers and to ``trainer.callback_metrics``.

    It does not see a loss called as a function, nor a compiled loss that was called before the fit.

    Args:
        every_n_steps: How often to log, in training batches.

    Examples:
        >>> from weince.integrations.lightning import TailLogger
        >>> callbacks = [TailLogger(every_n_steps=100)]  # Trainer(callbacks=callbacks)
    """

    def __init__(self, *, every_n_steps: int = 50) -> None:
        if type(every_n_steps) is not int or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be an int of at least 1; got {every_n_steps!r}")
        self.every_n_steps = every_n_steps
        self._batches = self._step = 0
        self._wanted = False
        self._asked: set[str] = set()  # losses whose current call we made return statistics
        self._seen: dict[str, list[TailStats]] = defaultdict(list)
        self._handles: list[Any] = []

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        losses = {name: part for name, part in pl_module.named_modules() if isinstance(part, ContrastiveLoss)}
        if not losses:
            raise ValueError(
                f"TailLogger found no loss of weince in {type(pl_module).__name__}; hold it as a submodule, like "
                "self.loss = WeinceLoss()"
            )
        for name, loss in losses.items():
            if loss.score != "cosine":
                raise ValueError(
                    f'TailLogger wants losses of cosines; got self.{name} with score="{loss.score}"'
                )
            self._watch(name if len(losses) > 1 else "", loss)

    def on_train_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int
    ) -> None:
        # All ranks count batches alike: with a gathered loss they must ask for statistics in the same batch.
        self._wanted = self._batches % self.every_n_steps == 0
        self._batches += 1
        self._step = trainer.global_step  # the step under which Lightning logs this batch
        self._asked.clear()

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._wanted = False
        if not self._seen:
            return
        summary = {
            f"tail/{name}/{key}" if name else f"tail/{key}": value
            for name, calls in self._seen.items()
            for key, value in summarize(calls).items()
        }
        self._seen.clear()
        numbers = dict(zip(summary, torch.stack(list(summary.values())).tolist(), strict=True))
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in numbers.items()})
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=self._step)

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        self._leave()

    def on_exception(
        self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        """Remove the hooks, since the losses may be used elsewhere."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()
        self._wanted = False

    def _watch(self, name: str, loss: ContrastiveLoss) -> None:
        """Hook a loss to collect its statistics in logged batches; its caller still gets the plain loss."""

        def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            if not self._wanted or kwargs.get("return_stats"):
                return None
            self._asked.add(name)
            return args, {**kwargs, "return_stats": True}

        def keep(module: nn.Module, args: Any, output: Tensor | LossOutput) -> Tensor | None:
            asked = name in self._asked
            self._asked.discard(name)
            if self._wanted and isinstance(output, LossOutput):
                self._seen[name].append(output.stats)
            return output.loss if asked and isinstance(output, LossOutput) else None

        self._handles.append(loss.register_forward_pre_hook(ask, with_kwargs=True))
        self._handles.append(loss.register_forward_hook(keep))


def summarize(calls: list[TailStats]) -> dict[str, Tensor]:
    """Mean and quantiles of each statistic over the anchors of some calls, as 0-dimensional tensors on their device.

    Values that are not finite (``rho`` of an anchor without negatives) are left out.
    """
    found = {}
    for field, values in zip(TailStats._fields, zip(*calls, strict=True), strict=True):
        every = wide(torch.cat(values))
        every = every.where(every.isfinite(), torch.nan)
        found[f"{field}_mean"] = every.nanmean()
        for name, q in QUANTILES.items():
            found[f"{field}_{name}"] = every.nanquantile(q)
    return found
