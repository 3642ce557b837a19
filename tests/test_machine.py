"""Devices by name, and the version."""

from importlib import metadata

import pytest
import torch

from weince import machine


def test_devices_by_name():
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    assert machine.find_device("auto") == torch.device(usual)
    assert machine.find_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or mps; got 'tpu'"):
        machine.find_device("tpu")


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.find_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="device 'cuda:1' was asked for; torch finds no CUDA device"):
        machine.find_device("cuda:1")


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    assert machine.version() == metadata.version("weince")

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert machine.version() == "from source"


@pytest.mark.parametrize("name", ["cuda:x", "cpu:", "auto:0", "mps0", ""])
def test_what_is_no_device(name):
    with pytest.raises(ValueError, match=f"device must be auto, cpu, cuda or mps; got '{name}'"):
        machine.find_device(name)


def test_one_gpu_of_too_few(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert machine.find_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"device 'cuda:2' was asked for; torch finds 2 CUDA device\(s\)"):
        machine.find_device("cuda:2")


@pytest.mark.parametrize(
    ("built", "said"), [(True, "torch finds no Apple GPU here"), (False, "torch was built without MPS")]
)
def test_an_apple_gpu_is_known_and_may_be_missing(built, said, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    with pytest.raises(ValueError, match=f"device 'mps' was asked for; {said}"):
        machine.find_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert machine.find_device("mps") == torch.device("mps")
