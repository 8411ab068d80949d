"""`gpipe plan`: what a network needs and how fast it would train on hardware that is not here. All of it simulated."""

from __future__ import annotations

import gc
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_cli.config_plan import HardwareConfig, PlanConfig
    from gpipe_cli.planning.planner import Plan


def run(config: PlanConfig) -> int:
    """Print the plan, or every column of a suite. Returns the exit code: 0, whether or not it fits."""
    if config.suite is not None:
        return _run_suite(config)
    from gpipe_cli.planning.network import make_planner
    from gpipe_cli.planning.search import best, suggestions
    from gpipe_cli.planning.text import describe, suggest

    planner = make_planner(config)
    # A plan is many small objects, and the collector would look through all of torch's again and again.
    gc.freeze()
    automatic = "auto" in (config.partitions, config.micro_batches)
    plan = best(planner) if automatic else planner.evaluate(planner.first_choice())
    if config.cut == "time":
        from gpipe_cli.planning.measuring import with_measured_stages

        plan = with_measured_stages(config, plan)
    lines = describe(config, plan, planner.bytes_per_parameter)
    if not plan.fits:
        lines += suggest(plan, suggestions(planner, plan))
    print("\n".join(lines))
    if config.timeline is not None:
        _draw(plan, Path(config.timeline))
    return 0


def _run_suite(config: PlanConfig) -> int:
    from gpipe_cli.planning.suite_text import describe_suite, update_plan_table
    from gpipe_cli.planning.suites import run_suite

    rows = run_suite(config, _find_hardware)
    command_line = shlex.join(["gpipe", *sys.argv[1:]])
    update_plan_table(Path(config.results_dir), rows, command_line)
    print("\n".join(describe_suite(rows)))
    print(f"table  {Path(config.results_dir, 'plan.md')}")
    return 0


def _find_hardware(name: str) -> HardwareConfig:
    from importlib import resources

    import yaml

    from gpipe_cli.config_plan import HardwareConfig

    text = (resources.files("gpipe_cli.conf") / "hardware" / f"{name}.yaml").read_text(encoding="utf-8")
    return HardwareConfig(**yaml.safe_load(text))


def _draw(plan: Plan, path: Path) -> None:
    from gpipe_cli.reporting.timeline import draw_timeline, write_trace

    if path.suffix == ".json":
        write_trace(path, plan.simulation.events, "simulated")
    else:
        draw_timeline(path, plan.simulation.events, "simulated")
    print(f"timeline  {path}")
