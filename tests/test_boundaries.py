"""The arrows of CONTRIBUTING.md, "Boundaries", checked on every import statement of the sources, wherever it stands.

cli -> commands -> training, data, reporting, distributed, models -> pipeline
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).parents[1]

# What everybody may import, except the engine and the models, which know nothing of the rest.
SHARED = (
    "gpipe_cli.errors",
    "gpipe_cli.config",
    "gpipe_cli.config_bench",
    "gpipe_cli.config_eval",
    "gpipe_cli.config_plan",
    "gpipe_cli.config_transfer",
)
# What stands between the commands and the engine.
WORK = ("gpipe_cli.pipeline", "gpipe_cli.data", "gpipe_cli.reporting", "gpipe_cli.distributed")
# What each package may import of the project, besides itself. The package with the longest matching name counts.
ALLOWED: dict[str, tuple[str, ...]] = {
    "gpipe_cli.pipeline": (),
    "models": (),
    "gpipe_cli.errors": (),
    "gpipe_cli.data": SHARED,
    # besides, the plain records that it writes down
    "gpipe_cli.reporting": (*SHARED, "gpipe_cli.pipeline", "gpipe_cli.data.info", "gpipe_cli.training.metrics"),
    "gpipe_cli.distributed": (*SHARED, "gpipe_cli.pipeline"),
    "gpipe_cli.training": (*SHARED, *WORK),
    "gpipe_cli.training.networks": (*SHARED, "gpipe_cli.pipeline", "gpipe_cli.models"),
    "gpipe_cli.benchmark": (*SHARED, *WORK, "gpipe_cli.training"),
    "gpipe_cli.planning": (*SHARED, *WORK, "gpipe_cli.training"),
    "gpipe_cli.commands": (
        *SHARED,
        *WORK,
        "gpipe_cli.training",
        "gpipe_cli.benchmark",
        "gpipe_cli.planning",
        "gpipe_cli.resume",
    ),
    "gpipe_cli.gpu_check": (
        *SHARED,
        *WORK,
        "gpipe_cli.training",
        "gpipe_cli.benchmark",
        "gpipe_cli.planning",
        "gpipe_cli.compose",
    ),
    "gpipe_cli.resume": (*SHARED, "gpipe_cli.catalogue", "gpipe_cli.overrides", "gpipe_cli.reporting.run_directory"),
    "gpipe_cli.pretrained": (
        *SHARED,
        "gpipe_cli.catalogue",
        "gpipe_cli.overrides",
        "gpipe_cli.reporting.run_directory",
    ),
}
VERSION = ("gpipe_cli", "gpipe_cli.__version__")
# What each package may import from outside the standard library, where that is limited.
OUTSIDE: dict[str, tuple[str, ...]] = {
    "gpipe_cli.pipeline": ("torch",),
    "gpipe_cli.pipeline.schedule": (),
    "gpipe_cli.pipeline.policies": (),
    "gpipe_cli.pipeline.validation": (),
    "gpipe_cli.pipeline.simulate": (),
    "models": ("torch", "timm.layers"),
    "gpipe_cli.errors": (),
    "gpipe_cli.data.info": (),
    "gpipe_cli.reporting.run_directory": ("yaml", "omegaconf"),
    "gpipe_cli.resume": (),
    "gpipe_cli.pretrained": ("hydra",),
}
# Everything that sits in gpipe_cli itself belongs to the command line, which answers before torch could be imported.
COMMAND_LINE_OUTSIDE = ("hydra", "omegaconf", "yaml")
# Names under which distributions are imported, where they differ.
DISTRIBUTION_OF = {"PIL": "pillow", "yaml": "pyyaml", "hydra": "hydra-core"}


@dataclass(frozen=True)
class Import:
    importer: str  # dotted name of the importing module
    imported: str  # dotted name of what is imported; for `from a import b` it is a.b
    place: str  # "path:line"
    is_relative: bool = False


def imports_below(root: Path) -> list[Import]:
    files = [*sorted(root.glob("gpipe_cli/**/*.py")), *sorted(root.glob("models/**/*.py")), *root.glob("conf/**/*.py")]
    return [found for file in files for found in imports_of(file, root)]


def imports_of(file: Path, root: Path) -> Iterator[Import]:
    relative = file.relative_to(root)
    parts = list(relative.with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    importer = ".".join(parts[:-1] if is_package else parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        place = f"{relative.as_posix()}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, place)
        elif isinstance(node, ast.ImportFrom):
            package = importer.split(".") if is_package else importer.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                yield Import(importer, f"{source}.{alias.name}", place, is_relative=node.level > 0)


def is_below(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def rule_for(module: str, rules: dict[str, tuple[str, ...]]) -> str | None:
    """The longest package among the rules that holds the module."""
    matching = [package for package in rules if is_below(module, (package,))]
    return max(matching, key=len, default=None)


def violations(root: Path) -> list[str]:
    return [f"{found.place}: {problem}" for found in imports_below(root) for problem in problems_of(found)]


def problems_of(found: Import) -> Iterator[str]:
    top = found.imported.split(".")[0]
    if top in ("gpipe_cli", "models", "conf", "tests"):
        yield from problems_inside(found)
    elif top not in sys.stdlib_module_names:
        yield from problems_outside(found)


def problems_inside(found: Import) -> Iterator[str]:
    importer, imported = found.importer, found.imported
    rule = rule_for(importer, ALLOWED)
    if rule == "models":
        # Installed, models/ is gpipe_cli.models: only relative imports find each other in both places.
        if not (found.is_relative and is_below(imported, ("models",))):
            yield f"models import only models, relatively, not {imported}"
    elif is_below(imported, ("models", "conf", "tests")):
        yield f"the name {imported} does not exist once installed"
    elif is_below(imported, ("gpipe_cli.models",)) and importer != "gpipe_cli.training.networks":
        yield f"only gpipe_cli.training.networks imports the models, not {importer}"
    elif rule is None:
        if is_command_line(importer) and is_below(imported, (*WORK, "gpipe_cli.training")):
            yield f"the command line may not import {imported}; it reaches the work through gpipe_cli.commands"
    elif not is_below(imported, (rule, *ALLOWED[rule])) and not (SHARED[0] in ALLOWED[rule] and imported in VERSION):
        yield f"{rule} may not import {imported}"


def problems_outside(found: Import) -> Iterator[str]:
    rule = rule_for(found.importer, OUTSIDE)
    if rule is not None and not is_below(found.imported, OUTSIDE[rule]):
        allowed = " and ".join(OUTSIDE[rule]) or "nothing but the standard library"
        yield f"{rule} may import {allowed}, not {found.imported}"
    elif rule is None and is_command_line(found.importer) and not is_below(found.imported, COMMAND_LINE_OUTSIDE):
        yield f"the command line may import {' and '.join(COMMAND_LINE_OUTSIDE)}, not {found.imported}"


def is_command_line(module: str) -> bool:
    return module == "gpipe_cli" or (module.startswith("gpipe_cli.") and rule_for(module, ALLOWED) is None)


def test_imports_follow_the_arrows() -> None:
    assert violations(ROOT) == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reading pyproject.toml needs tomllib, of Python 3.11")
def test_everything_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["tensorboard"]]
    declared = {requirement.split(">")[0].split("=")[0].strip().lower() for requirement in requirements}
    undeclared = {
        (found.imported, found.place)
        for found in imports_below(ROOT)
        if (top := found.imported.split(".")[0]) not in {*sys.stdlib_module_names, "gpipe_cli", "models"}
        and DISTRIBUTION_OF.get(top, top).lower() not in declared
    }
    assert undeclared == set()


@pytest.mark.parametrize(
    ("file", "statement", "problem"),
    [
        ("gpipe_cli/pipeline/stage.py", "import torchvision", "gpipe_cli.pipeline may import torch, not torchvision"),
        ("gpipe_cli/pipeline/stage.py", "from gpipe_cli.errors import ConfigError", "may not import gpipe_cli.errors"),
        ("gpipe_cli/pipeline/stage.py", "from ..config import TrainConfig", "may not import gpipe_cli.config"),
        ("gpipe_cli/pipeline/schedule.py", "import torch", "nothing but the standard library, not torch"),
        ("gpipe_cli/data/loaders.py", "def late():\n    from gpipe_cli.training import loop", "gpipe_cli.data may not"),
        ("gpipe_cli/training/loop.py", "from gpipe_cli.commands import train", "gpipe_cli.training may not import"),
        ("gpipe_cli/training/loop.py", "from ..models.amoebanet import network", "only gpipe_cli.training.networks"),
        ("gpipe_cli/reporting/tables.py", "import gpipe_cli.training.loop", "gpipe_cli.reporting may not import"),
        ("gpipe_cli/distributed/launch.py", "from gpipe_cli import cli", "gpipe_cli.distributed may not import"),
        ("gpipe_cli/cli.py", "import torch", "the command line may import hydra and omegaconf and yaml, not torch"),
        ("gpipe_cli/cli.py", "from gpipe_cli.training import loop", "the command line may not import"),
        ("gpipe_cli/commands/train.py", "from gpipe_cli.models import amoebanet", "only gpipe_cli.training.networks"),
        ("models/amoebanet/cell.py", "from gpipe_cli.pipeline import Pipeline", "models import only models"),
        ("models/amoebanet/cell.py", "from models.amoebanet import genotypes", "models import only models, relatively"),
        ("gpipe_cli/training/networks.py", "from models.amoebanet import amoebanet", "does not exist once installed"),
        ("models/amoebanet/cell.py", "import timm", "models may import torch and timm.layers, not timm"),
        ("models/amoebanet/cell.py", "from timm.models import create_model", "models may import torch and timm.layers"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, statement: str, problem: str) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(f'"""A module."""\n\nimport os\n{statement}\n')
    found = violations(tmp_path)
    assert len(found) == 1
    assert problem in found[0]
    assert found[0].startswith(file)


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("gpipe_cli/pipeline/stage.py", "import torch.distributed as dist\nfrom .schedule import Operation"),
        (
            "models/amoebanet/cell.py",
            "from timm.layers import DropPath\nfrom .operations import skip\nfrom torch import nn",
        ),
        ("gpipe_cli/training/networks.py", "from gpipe_cli.models.amoebanet import amoebanet"),
        (
            "gpipe_cli/commands/train.py",
            "from gpipe_cli.training import loop\nfrom gpipe_cli.config import TrainConfig",
        ),
        ("gpipe_cli/cli.py", "from gpipe_cli.commands import train\nfrom omegaconf import OmegaConf"),
    ],
)
def test_what_the_arrows_allow_is_not_a_violation(tmp_path: Path, file: str, statement: str) -> None:
    allowed = tmp_path / file
    allowed.parent.mkdir(parents=True)
    allowed.write_text(statement + "\n")
    assert violations(tmp_path) == []
