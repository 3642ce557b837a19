"""engine="auto": which engine it chooses, the reason it logs, and the fallbacks without memory or Triton."""

import importlib
import logging
import re
import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch

from weince import InfoNCELoss, WeinceLoss, engines
from weince.distributed import Ranks
from weince.engines.choose import choose
from weince.layouts import problems
from weince.sums import Need

module = importlib.import_module("weince.engines.choose")  # weince.engines.choose itself is the function


@pytest.fixture(autouse=True)
def _warnings_anew():
    module.warn_once.cache_clear()


def pairs(n=20, d=8):
    return torch.randn(2, n, d).unbind()


def contest_of(z_i, z_j):
    return problems("views", z_i, z_j)[0]


def on_meta(pairs):
    """A problem of any size that allocates no memory."""
    z = torch.empty(pairs, 4, device="meta")
    return contest_of(z, z)


def test_dense_while_the_matrix_fits_then_chunked():
    small, large = choose(on_meta(2048)), choose(on_meta(4096))
    assert small.name == "dense"
    assert "64 MiB is within 64 MiB" in small.reason
    assert large.name == "chunked"
    assert "256 MiB is beyond 64 MiB" in large.reason


def test_a_compiled_graph_is_dense_for_longer(monkeypatch):
    importlib.import_module("torch._dynamo")  # first imported under this patch, it could never compile a loss
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose(on_meta(8192)).name == "dense"
    assert choose(on_meta(8193)).name == "chunked"


@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_an_engine_asked_for_is_taken(engine):
    assert choose(on_meta(100), engine=engine) == (engine, "asked for")
    assert engines.choose is choose


def test_an_unknown_engine():
    with pytest.raises(ValueError, match="engine must be one of auto, dense, chunked, fused; got 'gpu'"):
        InfoNCELoss(engine="gpu")(*pairs())


def test_the_choice_is_logged(caplog):
    with caplog.at_level(logging.DEBUG, logger="weince"):
        InfoNCELoss()(*pairs())
        InfoNCELoss(engine="chunked")(*pairs())
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "engine dense: the fused engine wants tensors on a CUDA device",
        "engine chunked: asked for",
    ]


def test_fused_on_the_cpu_is_refused_with_the_reason():
    with pytest.raises(RuntimeError, match=r'^engine="fused" cannot serve: .+; engine="auto" takes another$'):
        InfoNCELoss(engine="fused")(*pairs())


EXHAUSTED = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
]


@pytest.mark.parametrize("error", EXHAUSTED, ids=["GPU", "CPU"])
@pytest.mark.parametrize(
    "loss", [WeinceLoss.paper, WeinceLoss, InfoNCELoss], ids=["paper", "released", "infonce"]
)
def test_out_of_memory_falls_back_to_chunked_with_one_warning(monkeypatch, loss, error):
    z_i, z_j = pairs()
    wanted = loss(engine="chunked")
    values = [wanted(z_i, z_j) for _ in range(3)]

    def exhausted(
        *arguments,
    ):  # the survey has moved the running slope, which the fallback must not move again
        raise error

    dense = module.ENGINE_OF["dense"]
    monkeypatch.setitem(module.ENGINE_OF, "dense", dense._replace(evaluate=exhausted))
    got = loss()
    with pytest.warns(
        UserWarning, match="out of memory in the dense engine; the chunked engine is used instead"
    ):
        assert got(z_i, z_j) == values[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [got(z_i, z_j) for _ in range(2)] == values[1:]


def dense_raises(monkeypatch, error):
    def failing(*arguments):
        raise error

    failing_engine = module.ENGINE_OF["dense"]._replace(evaluate=failing)
    monkeypatch.setitem(module.ENGINE_OF, "dense", failing_engine)


def test_the_gradient_after_a_fall_back_is_that_of_chunked(monkeypatch):
    z_i, z_j = pairs()
    (wanted,) = torch.autograd.grad(InfoNCELoss(engine="chunked")(z_i.requires_grad_(), z_j), z_i)

    dense_raises(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.warns(UserWarning, match="out of memory"):
        loss = InfoNCELoss()(z_i, z_j)
    torch.testing.assert_close(torch.autograd.grad(loss, z_i), (wanted,), rtol=0, atol=0)


def test_out_of_memory_in_an_engine_asked_for_is_an_error(monkeypatch):
    dense_raises(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        InfoNCELoss(engine="dense")(*pairs())
    spread = replace(contest_of(*pairs()), ranks=Ranks(0, (40, 40), (40, 40)))
    with pytest.raises(torch.OutOfMemoryError):  # with ranks there is no fallback: the others would wait
        InfoNCELoss().contrast(spread, Need())


def test_other_errors_pass(monkeypatch):
    dense_raises(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        InfoNCELoss()(*pairs())


class OnCuda:
    """Stand-in for rows on a GPU, so that the test needs none."""

    device = torch.device("cuda", 0)

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def element_size(self):
        return 4


def on_cuda(monkeypatch, pairs):
    gpu = types.SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return types.SimpleNamespace(anchors=OnCuda(2 * pairs), candidates=OnCuda(2 * pairs))


def test_without_triton_chunked_goes_on_after_one_line(monkeypatch):
    problem = on_cuda(monkeypatch, 50_000)
    monkeypatch.setitem(sys.modules, "weince.engines.fused", None)  # importing it now raises ImportError
    with pytest.warns(
        UserWarning, match="the fused engine cannot be imported: .*; the chunked engine is used instead"
    ):
        choice = choose(problem)
    assert choice.name == "chunked"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(problem) == choice


@pytest.mark.parametrize(("pairs", "name"), [(18_000, "dense"), (19_000, "chunked")])
def test_without_triton_a_sixteenth_of_the_gpu_is_for_the_matrix(monkeypatch, pairs, name):
    """With 80 GiB the limit is 5 GiB: a matrix of 4.8 GiB stays dense without a warning, one of 5.4 GiB does not."""
    problem = on_cuda(monkeypatch, pairs)
    monkeypatch.setitem(sys.modules, "weince.engines.fused", None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert choose(problem).name == name
    assert len(said) == (name == "chunked")


def test_a_torch_that_cannot_run_the_kernels(monkeypatch):
    unsuited = pytest.importorskip("weince.engines.fused").unsuited
    problem = on_cuda(monkeypatch, 50_000)
    assert unsuited("3.7.1", "6.3").endswith("got torch with ROCm 6.3")
    said = unsuited("3.2.0", None)
    assert said == "the fused engine wants Triton 3.5 or newer, as torch brings it since 2.9; got 3.2.0"
    assert not any(unsuited(version, None) for version in ["3.5.0", "3.7.1", "3.10.0+git1234", "4.0"])
    old = types.SimpleNamespace(why_not=lambda *_: said)
    monkeypatch.setitem(sys.modules, "weince.engines.fused", old)
    with pytest.warns(UserWarning, match=f"^weince: {re.escape(said)}; the chunked engine is used instead$"):
        assert choose(problem).name == "chunked"
    with pytest.raises(RuntimeError, match="cannot serve: the fused engine wants Triton"):
        choose(problem, engine="fused")


def test_fused_where_it_serves(monkeypatch):
    there = types.SimpleNamespace(why_not=lambda *_: None, ENGINE="the kernels")
    monkeypatch.setitem(sys.modules, "weince.engines.fused", there)
    choice = choose(on_cuda(monkeypatch, 50_000))
    assert choice.name == "fused"
    assert module.fused_engine() == "the kernels"


def test_a_ring_is_an_engine_of_its_own():
    assert choose(on_meta(100), ring=True).name == "ring"
