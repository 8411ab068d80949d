"""Versions and machine, as they go into every result."""

from __future__ import annotations

import platform

import torch

import gpipe_cli
from gpipe_cli.reporting.environment import Machine, machine, versions


def test_versions_are_those_that_run() -> None:
    found = versions()
    assert found["gpipe"] == gpipe_cli.__version__
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__


def test_machine_is_named_by_what_computed() -> None:
    here = machine("cpu")
    assert here.gpus == ()
    assert here.num_cores >= 1
    assert str(here) == f"{here.cpu}, {here.num_cores} cores"
    assert str(Machine("Intel", 16, ("NVIDIA H200", "NVIDIA H200"))) == "2 x NVIDIA H200"
