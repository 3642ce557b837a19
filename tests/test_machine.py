"""Devices by name, and the version."""

from importlib import metadata

import pytest
import torch

from weince import machine


def test_devices_by_name():
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    assert machine.find_device("auto") == torch.device(usual)
    assert machine.find_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda; got 'tpu'"):
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
