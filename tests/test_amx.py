"""CPUs that advertise AMX but may not use it. Both outcomes of the probe are simulated, on any machine."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from training import small_run, write_data

from weince import machine
from weince.lab import bench
from weince.lab.tasks.registry import train

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
SET = (
    "weince: this CPU advertises AMX but cannot use it: "
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 is set for this process\n"
)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """Unset both variables for the test; the first setenv makes monkeypatch restore ISA afterwards."""
    monkeypatch.setenv(machine.ISA, "for the undoing")
    monkeypatch.delenv(machine.ISA)
    monkeypatch.delenv("WEINCE_AMX", raising=False)


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    """A function that pretends the CPU has these flags."""

    def make(flags):
        path = tmp_path / "cpuinfo"
        path.write_text(f"processor : 0\nflags : {flags}\n")
        monkeypatch.setattr(machine, "_CPU", path)

    return make


def test_amx_whose_state_is_not_granted_is_avoided(cpu, monkeypatch, capsys):
    cpu("avx512_bf16 amx_bf16 amx_tile")
    monkeypatch.setattr(machine, "_PRODUCT", DIES)
    machine.prepare_cpu_for_bf16()
    assert os.environ[machine.ISA] == "AVX512_CORE_BF16"
    assert capsys.readouterr().err == SET
    monkeypatch.setattr(machine, "_PRODUCT", "never asked again")
    machine.prepare_cpu_for_bf16()
    assert capsys.readouterr().err == ""


def test_amx_that_works_is_used(cpu, monkeypatch, capsys):
    cpu("avx512_bf16 amx_bf16 amx_tile")
    monkeypatch.setattr(machine, "_PRODUCT", "pass")
    machine.prepare_cpu_for_bf16()
    assert machine.ISA not in os.environ
    assert capsys.readouterr().err == ""


def test_the_probe_multiplies(monkeypatch):
    environment = os.environ | {machine.ISA: machine.WITHOUT_AMX}
    ended = subprocess.run([sys.executable, "-c", machine._PRODUCT + "print(a.dtype, (a @ a)[0, 0].item())"],
                           env=environment, capture_output=True, text=True)  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "torch.bfloat16 64.0\n")


@pytest.mark.parametrize("flags", ["avx2 avx512_bf16", None], ids=["without AMX", "another system"])
def test_other_cpus_are_not_tried(flags, cpu, monkeypatch, tmp_path):
    if flags is None:
        monkeypatch.setattr(machine, "_CPU", tmp_path / "nothing here")
    else:
        cpu(flags)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a child process was started"))
    assert not machine.amx_is_broken()


def test_what_the_user_set_stays(cpu, monkeypatch):
    cpu("amx_bf16")
    monkeypatch.setenv(machine.ISA, "AVX2")
    monkeypatch.setattr(machine, "_PRODUCT", DIES)
    assert machine.avoid_broken_amx() is None
    assert os.environ[machine.ISA] == "AVX2"


def test_a_word_for_the_probe(monkeypatch):
    for word, broken in (("broken", True), ("works", False)):
        monkeypatch.setenv("WEINCE_AMX", word)
        assert machine.amx_is_broken() is broken
    monkeypatch.setenv("WEINCE_AMX", "perhaps")
    with pytest.raises(ValueError, match="WEINCE_AMX must be broken or works; got 'perhaps'"):
        machine.amx_is_broken()


def test_the_first_of_several_processes_says_it(monkeypatch, capsys):
    monkeypatch.setenv("WEINCE_AMX", "broken")
    monkeypatch.setenv("RANK", "1")
    machine.prepare_cpu_for_bf16()
    assert os.environ[machine.ISA] == "AVX512_CORE_BF16"
    assert capsys.readouterr().err == ""


def test_runs_in_bf16_ask_and_others_do_not(monkeypatch, tmp_path):
    monkeypatch.setenv("WEINCE_AMX", "perhaps")  # reading it is an error
    data = write_data(tmp_path)
    train(small_run(data, tmp_path / "fp32", epochs=1), bar=False)
    for precision in ("bf16", "bf16-embeddings"):
        with pytest.raises(ValueError, match="WEINCE_AMX"):
            train(small_run(data, tmp_path / "half", precision=precision), bar=False)
    bench.bench_loss(pairs=[4], d=3, repeats=1, device="cpu", compiled=False)
    with pytest.raises(ValueError, match="WEINCE_AMX"):
        bench.bench_loss(pairs=[4], d=3, repeats=1, device="cpu", dtype="bfloat16", compiled=False)


def test_models_that_were_saved_in_bf16_ask_and_others_do_not(monkeypatch):
    monkeypatch.setenv("WEINCE_AMX", "perhaps")
    machine.prepare_cpu_for(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="WEINCE_AMX"):
        machine.prepare_cpu_for(torch.nn.Linear(2, 2).bfloat16())


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AMX is a part of x86 CPUs")
def test_the_command_trains_in_bf16_and_says_what_it_set(tmp_path):
    # AVX2 stands in for "without AMX", so that any x86 machine shows whether torch obeyed.
    program = """
import torch
from weince import cli, machine
machine.WITHOUT_AMX = "AVX2"
ended = cli.main()
torch.nn.functional.conv2d(torch.ones(8, 3, 32, 32), torch.ones(32, 3, 3, 3))
raise SystemExit(ended)
"""
    settings = {"data": write_data(tmp_path), "out": tmp_path / "run", "precision": "bf16", "device": "cpu"}
    settings |= {"augment.size": 16, "batch": 32, "epochs": 1}
    options = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    ended = subprocess.run(
        [sys.executable, "-c", program, "train", *options],
        env=os.environ | {"WEINCE_AMX": "broken", "ONEDNN_VERBOSE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert SET.replace("AVX512_CORE_BF16", "AVX2") in ended.stderr
    assert "cpu,isa:Intel AVX2\n" in ended.stdout
    assert (tmp_path / "run" / "model.safetensors").is_file()
