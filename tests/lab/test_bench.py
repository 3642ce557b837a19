"""The benchmark on the user's machine: which losses are timed or skipped, and what is printed."""

import os
import time

import pytest
import torch
from rich.console import Console

from weince import InfoNCELoss, progress
from weince.cli import main
from weince.lab import bench
from weince.lab.bench import YARDSTICK, Timing, bench_loss, plain_info_nce, table


def drawn(timings):
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(timings))
    return console.export_text()


def test_the_yardstick_is_infonce():
    z_i, z_j = torch.randn(2, 12, 5, dtype=torch.float64).unbind()
    torch.testing.assert_close(plain_info_nce(z_i, z_j), InfoNCELoss(0.5)(z_i, z_j))


def test_ours_and_others_in_one_table():
    timings = bench_loss(pairs=[4, 9], d=3, repeats=2, device="cpu", compiled=False)
    names = [row.name for row in timings if row.pairs == 9]
    assert names[0] == YARDSTICK
    assert "weince WeinceLoss (released)" in names
    assert "weince WeinceLoss.paper, chunked" in names
    assert [row.name for row in timings if row.pairs == 4] == names
    for row in timings:
        assert row.ms is not None
        assert row.ms > 0
        yardstick = next(r.ms for r in timings if r.pairs == row.pairs and r.name == YARDSTICK)
        assert row.ratio == pytest.approx(row.ms / yardstick)
    text = drawn(timings)
    assert all(name in text for name in names)


def test_peers_that_are_installed_take_part_while_they_fit():
    pytest.importorskip("pytorch_metric_learning")
    peer = "pytorch-metric-learning NTXent"
    (small,) = [
        t for t in bench_loss(pairs=[4], d=3, repeats=1, device="cpu", compiled=False) if t.name == peer
    ]
    assert small.ms is not None
    entry = next(entry for entry in bench._peers())
    assert entry.bytes_for(256) < bench.PEER_BYTES < entry.bytes_for(512)


def test_what_does_not_run_says_why(monkeypatch):
    def exhausted(z_i, z_j):
        raise torch.OutOfMemoryError("CUDA out of memory")

    too_large = bench.Entry("large", plain_info_nce, lambda pairs: 5 << 30)
    entries = [bench.Entry(YARDSTICK, plain_info_nce), bench.Entry("greedy", exhausted), too_large]
    monkeypatch.setattr(bench, "_entries", lambda device, compiled: entries)
    yardstick, greedy, large = bench_loss(pairs=[4], d=3, repeats=1, device="cpu")
    assert yardstick.ratio == 1
    assert greedy == Timing(4, "greedy", note="out of memory")
    assert large == Timing(4, "large", note="skipped, needs about 5 GiB")
    text = drawn([yardstick, greedy, large])
    assert "out of memory" in text
    assert "skipped, needs about 5 GiB" in text


def test_a_slow_first_call_does_not_count(monkeypatch):
    calls = []

    def compiles_first(z_i, z_j):
        calls.append(time.sleep(1.2 if not calls else 0))
        return plain_info_nce(z_i, z_j)

    monkeypatch.setattr(bench, "_entries", lambda device, compiled: [bench.Entry(YARDSTICK, compiles_first)])
    monkeypatch.setattr(bench, "ENOUGH_SECONDS", 1.0)
    (timing,) = bench_loss(pairs=[4], d=3, repeats=3, device="cpu")
    assert timing.ms < 1000
    assert len(calls) == 3 + bench.WARM_UP


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    options = ["--pairs", "4", "--d", "3", "--repeats", "1", "--device", "cpu", "--no-compile"]
    assert main(["bench", "loss", *options]) == 0
    said = capsys.readouterr()
    assert YARDSTICK in said.out
    assert "4 pairs: 1 of 28, torch InfoNCE" in said.err  # stdout is for the table
    assert "4 pairs" not in said.out
    assert main(["bench", "loss", "--pairs", "1"]) == 2
    assert "weince: wanted pairs of at least 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": [1]}, r"pairs of at least 2.*got \[1\]"),
        ({"pairs": []}, "pairs of at least 2"),
        ({"repeats": 0}, "repeats of at least 1.*128, 0"),
        ({"dtype": "int8"}, "dtype must be float32.*got 'int8'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        bench_loss(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_to_ask_for():
    with pytest.raises(ValueError, match="'cuda' was asked for; torch finds no CUDA device"):
        bench_loss(device="cuda")
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or mps; got 'tpu'"):
        bench_loss(device="tpu")
