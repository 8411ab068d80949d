"""The command: dispatch, exit codes, one-line errors, what is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from gpipe_cli import __version__
from gpipe_cli.cli import COMMANDS, main
from gpipe_cli.config import TrainConfig
from gpipe_cli.errors import TrainingError

NAMES = ", ".join(command.name for command in COMMANDS)


def gpipe(*arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpipe_cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Configurations that reached the command, in place of training."""
    reached: list[TrainConfig] = []
    module = types.ModuleType("gpipe_cli.commands.train")
    module.run = lambda config: reached.append(config) or 0  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "gpipe_cli.commands.train", module)
    return reached


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(config: TrainConfig) -> int:
        raise error

    module = types.ModuleType("gpipe_cli.commands.train")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpipe_cli.commands.train", module)


def test_a_command_gets_its_checked_configuration_and_gives_the_exit_code(runs) -> None:
    assert main(["train", "model=amoebanet", "partitions=4"]) == 0
    assert (runs[0].command, runs[0].model.name, runs[0].partitions) == ("train", "amoebanet", 4)


def test_a_refused_setting_is_one_line_and_starts_nothing(runs, capsys) -> None:
    assert main(["train", "+partitons=4"]) == 2
    assert capsys.readouterr().err == "gpipe: error: +partitons=4: unknown key; did you mean partitions?\n"
    assert runs == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], f"trian: unknown command; did you mean train? commands: {NAMES}"),
        (["xyz"], f"xyz: unknown command; commands: {NAMES}"),
        (["partitions=4"], "partitions=4: a command comes first: gpipe train partitions=4"),
        (["--partitions"], "--partitions: unknown option; gpipe takes --help and --version before a command"),
        (
            ["train", "--partitions=4"],
            "--partitions=4: unknown option; gpipe train takes -m, --cfg, --help and settings written key=value",
        ),
        (["train", "4"], "4: expected key=value"),
        (["train", ""], "'': expected key=value"),
        (
            ["train", "hydra.ouput_subdir=x"],
            "hydra.ouput_subdir=x: gpipe takes no hydra settings; results_dir and run_dir name the output folders",
        ),
    ],
)
def test_a_wrong_command_or_option_is_one_line_and_exit_code_2(arguments: list[str], line: str, capsys) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"gpipe: error: {line}\n"


def test_no_command_shows_the_usage_on_stderr(capsys) -> None:
    assert main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("usage: gpipe COMMAND")


def test_the_overview_lists_the_commands_that_exist(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    assert ", ".join(listed[: len(COMMANDS)]) == NAMES


def test_the_version_is_the_packages(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gpipe {__version__}\n"


def test_a_failure_while_running_is_one_line_and_its_exit_code(monkeypatch, capsys) -> None:
    fail_with(monkeypatch, TrainingError("step 3: the loss is nan"))
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "gpipe: error: step 3: the loss is nan\n"


def test_an_interrupt_is_one_line_and_exit_code_130(monkeypatch, capsys) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "gpipe: interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch) -> None:
    fail_with(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_cfg_prints_the_resolved_configuration_and_runs_nothing(runs, capsys) -> None:
    assert main(["train", "--cfg", "dataset=cifar10", "partitions=2"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["partitions"], shown["image_size"], shown["dataset"]["name"]) == (2, 32, "cifar10")
    assert runs == []


def test_a_sweep_runs_every_combination_and_checks_all_before_the_first(monkeypatch, capsys) -> None:
    jobs: list[list[str]] = []
    monkeypatch.setattr("gpipe_cli.sweep.run_sweep", lambda command, words: jobs.extend(words) or 0)
    assert main(["train", "-m", "partitions=1,2", "seed=3"]) == 0
    assert jobs == [["partitions=1", "seed=3"], ["partitions=2", "seed=3"]]
    jobs.clear()
    assert main(["train", "--multirun", "partitions=1,0"]) == 2
    assert jobs == []
    assert "partitions=0: expected a whole number, 1 or more" in capsys.readouterr().err


def test_cfg_of_a_sweep_shows_every_job(capsys) -> None:
    assert main(["train", "-m", "--cfg", "partitions=1,2"]) == 0
    assert [job["partitions"] for job in yaml.safe_load_all(capsys.readouterr().out)] == [1, 2]


def test_under_torchrun_only_rank_0_reports_a_refused_setting(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "partitons=4"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "partitons=4"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("word", ["partitons=4", "+partitons=4", "partitions=4.5", "lr=abc", "model=amobanet", "a=[1"])
def test_as_a_process_a_refusal_is_one_line_without_traceback_and_writes_nothing(word: str, tmp_path: Path) -> None:
    done = gpipe("train", word, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"gpipe: error: {word}: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_causes_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpipe_cli", "train", "--help"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()  # long before the page is ready
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(60) == 141


def modules_after(arguments: list[str], cwd: Path) -> set[str]:
    """Top-level modules that a process has imported after main(arguments)."""
    code = (
        f"import sys; from gpipe_cli.cli import main; code = main({arguments!r}); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60, check=True)
    return {name.partition(".")[0] for name in done.stderr.split()}


HEAVY = {"torch", "torchvision", "timm", "numpy", "matplotlib", "PIL"}


def test_the_overview_imports_neither_hydra_nor_torch(tmp_path: Path) -> None:
    assert not modules_after(["--help"], tmp_path) & (HEAVY | {"hydra", "omegaconf", "yaml"})


@pytest.mark.parametrize("arguments", [["train", "--help"], ["train", "--cfg"], ["train", "partitons=4"]])
def test_help_and_refusals_import_no_torch(arguments: list[str], tmp_path: Path) -> None:
    assert not modules_after(arguments, tmp_path) & HEAVY


@pytest.mark.parametrize(("arguments", "limit_s"), [(["--help"], 0.3), (["train", "--help"], 1.5)])
def test_help_is_quick(arguments: list[str], limit_s: float, tmp_path: Path) -> None:
    # CPU seconds, best of three: what else the machine does is not counted.
    times_s = []
    for _ in range(3):
        before = os.times()
        assert gpipe(*arguments, cwd=tmp_path).returncode == 0
        after = os.times()
        times_s.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times_s) < limit_s


def test_a_reader_that_has_gone_ends_a_plan_without_a_word(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpipe_cli", "plan", "partitions=2", "hardware=v100"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 141)


def test_a_pipe_that_breaks_elsewhere_is_no_reader_that_has_gone(monkeypatch, capfd) -> None:
    fail_with(monkeypatch, BrokenPipeError("a rank"))
    with capfd.disabled(), Path(os.devnull).open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError, match="a rank"):
            main(["train"])
