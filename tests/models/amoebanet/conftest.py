"""The plain definitions (references.py) as a fixture: test modules, imported by path, cannot import each other."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def references() -> ModuleType:
    spec = importlib.util.spec_from_file_location("amoebanet_references", Path(__file__).with_name("references.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
