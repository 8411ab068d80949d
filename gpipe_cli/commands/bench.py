"""`gpipe bench`: measure every row of a grid, or of one of the paper's tables, beside what it is compared with."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_cli.benchmark.apart import apart
from gpipe_cli.benchmark.grid import Case, Impossible, grid, groups, with_baselines
from gpipe_cli.benchmark.results import Comparison, Result, by_case, compare
from gpipe_cli.benchmark.rows import Origin, memory_row, network_name, throughput_row
from gpipe_cli.benchmark.screen import ScreenTable
from gpipe_cli.benchmark.suites import suite_cases
from gpipe_cli.benchmark.survey import survey
from gpipe_cli.distributed.rendezvous import find_joined_world
from gpipe_cli.errors import ConfigError, OutOfMemoryError
from gpipe_cli.reporting.environment import machine
from gpipe_cli.reporting.memory import update_memory
from gpipe_cli.reporting.progress import Progress
from gpipe_cli.reporting.run_directory import (
    check_tables_can_be_written,
    claim_run_directory,
    one_line_if_not_written,
    write_config,
)
from gpipe_cli.reporting.speedup import Speed, plot_speedup
from gpipe_cli.reporting.throughput import update_throughput
from gpipe_cli.reporting.timeline import draw_timeline, write_trace

if TYPE_CHECKING:
    from gpipe_cli.config_bench import BenchConfig


def run(config: BenchConfig) -> int:
    """Measure as configured; rows appear as they are measured. Returns 1 if a row failed, else 0.

    Raises ConfigError for a bad network or suite, and when no row can be measured here.
    """
    if find_joined_world(os.environ) is not None:
        raise ConfigError(None, "bench", "starts ranks of its own for each row; type it without torchrun or srun")
    check_tables_can_be_written(Path(config.results_dir))
    found = _survey(config)
    ours = [case for case in found if isinstance(case, Case)]
    impossible = [case for case in found if isinstance(case, Impossible)]
    for row in impossible:
        print(f"not measured: {row}", flush=True)
    if not ours:
        key = "suite" if config.suite is not None else None
        raise ConfigError(key, config.suite, "no row can be measured here; the lines above say why")
    return Bench(config, ours).run()


def _survey(config: BenchConfig) -> list[Case | Impossible]:
    wanted = suite_cases(config) if config.suite is not None else grid(config)
    return apart(survey, config, wanted)


class Bench:
    """Measures the rows `ours` group by group; prints and writes what comes of each."""

    def __init__(self, config: BenchConfig, ours: Sequence[Case]) -> None:
        self._config = config
        self._groups, self._impossible = _with_baselines(config, ours)
        self._results_dir = Path(config.results_dir)
        self._device_type = apart(_device_type, config, ours[0])
        self._origin = Origin(
            machine=apart(_machine, self._device_type), command_line=shlex.join(["gpipe", *sys.argv[1:]])
        )
        num_members = sum(len(members) for members in self._groups)
        self._num_steps = num_members * (config.steps + config.warmup_steps)
        self._table = ScreenTable([case for members in self._groups for case in members])
        self._done = 0
        self._measured: list[Result] = []
        self._failed = False
        self._run_dir: Path | None = None

    def run(self) -> int:
        """All groups, then the plot; returns the exit code."""
        _import_before_forking(self._config)
        from gpipe_cli.benchmark.rounds import measure_group

        with Progress(self._config.progress, self._num_steps, unit="samples") as self._progress:
            for row in self._impossible:
                self._say(f"not measured: {row}")
            self._say("\n".join([*self._explanation(), self._table.header]))
            for members in self._groups:
                results = measure_group(self._config, members, self._device_type, self._advance)
                for result in results:
                    self._show(result, by_case(results))
        self._plot()
        print(f"tables   {self._results_dir / 'throughput.md'}, {self._results_dir / 'memory.md'}")
        if self._run_dir is not None:
            print(f"traces   {self._run_dir}")
        return int(self._failed)

    def _advance(self, num_steps: int) -> None:
        self._done += num_steps
        self._progress.update(self._done)

    def _say(self, text: str) -> None:
        self._progress.message(text, to=sys.stdout)

    def _explanation(self) -> list[str]:
        config, case = self._config, self._groups[0][0]
        model = case.model
        size = {"amoebanet": f" ({model.layers}, {model.filters})", "transformer": f" of {model.layers} blocks"}
        sample = f"input {case.image_size}" if case.seq_len is None else f"sequences of {case.seq_len} tokens"
        rounds = f"{config.steps} steps in {config.rounds} rounds" if config.rounds > 1 else f"{config.steps} steps"
        return [
            f"{network_name(model)}{size.get(model.name, '')}, {sample}, batch {case.batch_size}, {config.precision}, "
            f"{config.optimizer.name}; {self._origin.machine}",
            "a step: forward, backward and update of one mini-batch, all ranks from start to end; median (quartiles)",
            f"of {rounds} after {config.warmup_steps} that warm up; speed-up over "
            f"{'the fewest K beside it' if config.suite is None else 'the first row'}; memory: peak of "
            f"{'what is allocated' if self._device_type == 'cuda' else 'activations, counted'}; a+b: rank by rank",
        ]

    def _show(self, result: Result, others: dict[Case, Result]) -> None:
        if result.error is not None:
            self._failed = True
            self._say(f"failed: {result.case}: {result.error}")
            if isinstance(result.error, OutOfMemoryError) and result.case.baseline is None:
                with one_line_if_not_written(self._results_dir):
                    update_memory(self._results_dir, memory_row(self._config, result, self._origin))
            return
        comparison = self._comparison(result, others)
        self._say(self._table.row(result, comparison))
        with one_line_if_not_written(self._results_dir):
            update_throughput(self._results_dir, throughput_row(self._config, result, comparison, self._origin))
            update_memory(self._results_dir, memory_row(self._config, result, self._origin))
            if self._config.trace and result.end is not None and any(result.end.events):
                self._trace(result)
        if result.case.baseline is None:
            self._measured.append(result)

    def _comparison(self, result: Result, others: dict[Case, Result]) -> Comparison:
        if result.case.baseline is not None:
            return Comparison()
        comparison = compare(result, others)
        if self._config.suite in (None, "table1"):
            return comparison
        # The table's own reference, its first row of the network, was measured earlier.
        first = next((earlier for earlier in self._measured if earlier.case.model == result.case.model), result)
        return dataclasses.replace(
            comparison,
            speedup=result.samples_per_s / first.samples_per_s,
            over=f"K={first.case.partitions} M={first.case.micro_batches}",
        )

    def _trace(self, result: Result) -> None:
        assert result.end is not None
        if self._run_dir is None:
            self._run_dir = self._claim_run_directory()
        case = result.case
        stem = "-".join(
            [*([case.baseline] if case.baseline else []), f"k{case.partitions}", f"m{case.micro_batches}", case.remat,
             case.schedule, *(["tapered"] if case.taper else [])]
        )  # fmt: skip
        if case.name is not None:
            stem = f"{case.name.lower()}-{stem}"
        clock = ", times at which the host started the work" if self._device_type == "cuda" else ""
        title = f"{case}, batch {case.batch_size}, measured{clock}"
        draw_timeline(self._run_dir / f"{stem}.png", result.end.events, title)
        write_trace(self._run_dir / f"{stem}.json", result.end.events, title)

    def _claim_run_directory(self) -> Path:
        config = self._config
        names = (config.command, config.model.name, config.suite or "grid")
        run_dir = claim_run_directory(config.run_dir, self._results_dir, *names)
        write_config(run_dir, dataclasses.asdict(config))
        return run_dir

    def _plot(self) -> None:
        speeds = [
            Speed(
                curve=", ".join(
                    [
                        f"remat {case.remat}",
                        *([case.schedule] if case.schedule != "gpipe" else []),
                        *(["tapered"] if case.taper else []),
                    ]
                ),
                partitions=case.partitions,
                micro_batches=case.micro_batches,
                samples_per_s=result.samples_per_s,
            )
            for result in self._measured
            if (case := result.case).name is None
        ]
        text = self._groups[0][0].seq_len is not None
        path = self._results_dir / ("speedup-text.png" if text else "speedup.png")
        with one_line_if_not_written(path):
            if plot_speedup(path, speeds, self._explanation()[0], "transformer" if text else "amoebanet"):
                print(f"plot     {path}")


def _with_baselines(config: BenchConfig, ours: Sequence[Case]) -> tuple[list[list[Case]], list[Impossible]]:
    """Groups with those baselines that can be measured, and why others cannot."""
    wanted = [with_baselines(group, config.baseline or ()) for group in groups(ours)]
    extra = list(dict.fromkeys(case for members in wanted for case in members if case.baseline is not None))
    known: list[Case | Impossible] = apart(survey, config, extra) if extra else []
    surveyed = dict(zip(extra, known, strict=True))
    result = [[found for case in members if isinstance(found := surveyed.get(case, case), Case)] for members in wanted]
    return result, [case for case in known if isinstance(case, Impossible)]


def _import_before_forking(config: BenchConfig) -> None:
    """Pay for the slow imports once, in the process that all ranks are forked from."""
    import timm.optim

    import gpipe_cli.benchmark.worker  # noqa: F401

    if "torch" in (config.baseline or ()):
        import torch.distributed.pipelining  # noqa: F401
    del timm


def _device_type(config: BenchConfig, case: Case) -> str:
    from gpipe_cli.benchmark.survey import rank_plan

    return rank_plan(config, case).device_type


def _machine(device_type: str) -> str:
    return str(machine(device_type))
