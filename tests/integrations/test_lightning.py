"""The Lightning callback logs the tail statistics, and does not change training."""

import csv
import importlib.util
import math
import sys

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from weince import DCLLoss, InfoNCELoss, TailConfig, TailStats, WeinceLoss
from weince.integrations import lightning
from weince.integrations.lightning import TailLogger, summarize

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and loggers

ROWS = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
LOSSES = {
    "paper": lambda: WeinceLoss.paper(tail=TailConfig(k=8, kappa_rho=3.0)),
    "released": WeinceLoss,
    "dcl": DCLLoss,
    "infonce": InfoNCELoss,
}


class Module(pl.LightningModule):
    """Two noisy views through a linear map."""

    def __init__(self, loss, compiled=False, **call):
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Linear(8, 4)
        # This tests how Dynamo treats the hooks, so the eager backend is enough.
        self.loss = torch.compile(loss, backend="eager") if compiled else loss
        self.call = call
        self.returned = []

    def views(self, batch):
        (x,) = batch
        noise = torch.linspace(-0.3, 0.3, 8)
        return self.net(x + noise), self.net(x - noise)

    def training_step(self, batch, batch_idx):
        output = self.loss(*self.views(batch), **self.call)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        self.returned.append(output.detach() if loss is output else output)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.loss(*self.views(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1)


def fit(module, *callbacks, logger=False, **options):
    trainer = pl.Trainer(
        **{"max_epochs": 2, **options},
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, DataLoader(TensorDataset(ROWS), 16))
    return trainer


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in LOSSES), ("released", True)])
def test_training_is_the_same_with_and_without(name, compiled, fresh_compiler):
    """Compare weights, losses and buffers; a running slope must not move twice per step."""
    with_it, without = Module(LOSSES[name](), compiled), Module(LOSSES[name](), compiled)
    fit(with_it, TailLogger(every_n_steps=2))
    fit(without)
    # With statistics, these losses compute small shortfalls in another way.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name in ("infonce", "dcl") else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(with_it.state_dict(), without.state_dict(), **tolerance)
    assert len(with_it.returned) == 8
    torch.testing.assert_close(with_it.returned, without.returned, **tolerance)


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in LOSSES), ("paper", True)])
def test_the_numbers_are_those_of_the_batch(name, compiled, fresh_compiler):
    module = Module(LOSSES[name](), compiled)
    z_i, z_j = module.views([ROWS[:16]])
    stats = LOSSES[name]()(z_i, z_j, return_stats=True).stats
    metrics = fit(module, TailLogger(), max_steps=1).callback_metrics
    for field, values in stats._asdict().items():
        values = values.double().numpy()
        found = {key: float(metrics[f"tail/{field}_{key}"]) for key in ("mean", "p10", "p50", "p90")}
        assert found["mean"] == pytest.approx(values.mean(), rel=1e-5, abs=1e-7)
        for key, q in {"p10": 10, "p50": 50, "p90": 90}.items():
            assert found[key] == pytest.approx(np.percentile(values, q), rel=1e-5, abs=1e-7)
    assert float(metrics["tail/daic_p90"]) > float(metrics["tail/daic_p10"])


def test_every_third_batch_beside_what_lightning_logs(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    fit(Module(LOSSES["paper"]()), TailLogger(every_n_steps=3), logger=logger)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["loss"]] == [str(step) for step in range(8)]
    assert [row["step"] for row in rows if row["tail/lam_mean"]] == ["0", "3", "6"]


def test_statistics_asked_for_by_the_module_reach_it(tmp_path):
    module = Module(LOSSES["paper"](), return_stats=True)
    metrics = fit(module, TailLogger(), max_steps=1).callback_metrics
    assert float(metrics["tail/lam_mean"]) == pytest.approx(float(module.returned[0].stats.lam.mean()))


def test_several_losses_and_several_calls():
    class Two(Module):
        def __init__(self):
            super().__init__(LOSSES["paper"]())
            self.heads = nn.ModuleDict({"other": InfoNCELoss(0.1)})

        def training_step(self, batch, batch_idx):
            z_i, z_j = self.views(batch)
            half = self.loss(z_i[:8], z_j[:8]) + self.loss(z_i[8:], z_j[8:])
            return half + self.heads["other"](z_i, z_j)

    module = Two()
    z_i, z_j = module.views([ROWS[:16]])
    halves = [module.loss(z_i[s], z_j[s], return_stats=True).stats.rho for s in (slice(8), slice(8, None))]
    whole = module.heads["other"](z_i, z_j, return_stats=True).stats.rho
    metrics = fit(module, TailLogger(), max_steps=1).callback_metrics
    assert float(metrics["tail/loss/rho_mean"]) == pytest.approx(float(torch.cat(halves).mean()))
    assert float(metrics["tail/heads.other/rho_mean"]) == pytest.approx(float(whole.mean()))


def test_validation_and_what_comes_after_are_left_alone():
    callback, module = TailLogger(every_n_steps=1), Module(LOSSES["paper"]())
    rows = DataLoader(TensorDataset(ROWS), 16)
    trainer = fit(module, callback)
    before = dict(trainer.callback_metrics)
    trainer.validate(module, rows, verbose=False)
    assert isinstance(module.loss(*module.views([ROWS])), torch.Tensor)
    assert not callback._seen
    assert not module.loss._forward_hooks
    assert not module.loss._forward_pre_hooks
    assert before["tail/lam_mean"].isfinite()


def test_an_error_in_a_step_takes_the_hooks_off():
    class Fails(Module):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise RuntimeError("on purpose")

    module = Fails(LOSSES["paper"]())
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(module, TailLogger())
    assert not module.loss._forward_hooks
    assert not module.loss._forward_pre_hooks


def test_a_learned_temperature_trains_with_the_module():
    """Two towers with own hard negatives; the callback changes nothing, and the checkpoint holds the temperature."""

    class Towers(Module):
        def training_step(self, batch, batch_idx):
            z_i, z_j = self.views(batch)
            loss = self.loss(z_i, z_j, negatives=torch.stack([z_j.roll(1, 0), z_j.roll(2, 0)], 1))
            self.log("temperature", self.loss.temperature_now())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    weights = []
    for callbacks in ((), (TailLogger(every_n_steps=2),)):
        module = Towers(InfoNCELoss(0.2, learn_temperature=True, candidates="clip"))
        trainer = fit(module, *callbacks)
        weights.append(module.state_dict())
        assert float(trainer.callback_metrics["temperature"]) != pytest.approx(0.2, abs=1e-3)
    assert weights[0]["loss.log_scale"] != pytest.approx(-math.log(0.2), abs=1e-3)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)
    assert float(trainer.callback_metrics["tail/rho_mean"]) > 0


def test_bad_use():
    with pytest.raises(
        ValueError, match=r'TailLogger wants losses of cosines; got self\.loss with score="dot"'
    ):
        fit(Module(InfoNCELoss(1.0, candidates="cross", score="dot")), TailLogger())
    with pytest.raises(
        ValueError, match="TailLogger found no loss of weince in Module; hold it as a submodule"
    ):
        fit(Module(nn.CosineEmbeddingLoss()), TailLogger())
    for number in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="every_n_steps must be an int of at least 1; got"):
            TailLogger(every_n_steps=number)


def test_what_is_not_finite_is_left_out():
    rho = torch.tensor([0.5, torch.inf, 0.1])
    found = summarize([TailStats(rho, rho, rho, rho), TailStats(rho, rho, rho, rho)])
    assert float(found["rho_mean"]) == pytest.approx(0.3)
    assert float(found["lam_p90"]) == pytest.approx(0.5)


def test_the_summary_reads_nothing_from_the_device():
    """Tensors on ``meta`` have no values, so reading one fails."""
    empty = torch.empty(9, device="meta")
    found = summarize([TailStats(empty, empty, empty, empty)])
    assert len(found) == 16
    assert {value.shape for value in found.values()} == {()}


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning", None])
def test_either_name_of_lightning(monkeypatch, name):
    """The two packages contain the same code under two names."""
    present = {name: pl, "lightning": pl} if name == "lightning.pytorch" else {name: pl}
    for package in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, package, present.get(package))
    spec = importlib.util.spec_from_file_location("fresh", lightning.__file__)
    fresh = importlib.util.module_from_spec(spec)
    if name is None:
        with pytest.raises(ImportError, match="needs Lightning: pip install lightning, or pytorch-lightning"):
            spec.loader.exec_module(fresh)
    else:
        spec.loader.exec_module(fresh)
        assert issubclass(fresh.TailLogger, pl.Callback)
