"""The command `gpipe`: which command runs, with which settings, and what becomes of its errors.

Imports nothing heavy: `gpipe --help` needs neither Hydra nor torch, and `gpipe train --help` not torch. Exit codes:
0 done, 1 failed while running, 2 refused before anything was done, 130 interrupted, 141 nobody reads the output.
"""

from __future__ import annotations

import difflib
import importlib
import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gpipe_cli import __version__
from gpipe_cli.errors import ConfigError, GpipeError


@dataclass(frozen=True, kw_only=True)
class Command:
    """A row of the table of commands: conf/<name>.yaml is its root file, `module` has `run(config) -> int`."""

    name: str
    summary: str
    module: str
    examples: tuple[tuple[str, str], ...]  # (arguments, what they do)
    notes: tuple[str, ...] = ()  # what else its help says


COMMANDS = (
    Command(
        name="train",
        summary="train a network through a pipeline of partitions",
        module="gpipe_cli.commands.train",
        examples=(
            ("model=amoebanet partitions=4", "AmoebaNet on the built-in digits, cut into 4 parts, a process each"),
            ("dataset=folder dataset.path=photos image_size=96 epochs=30", "your pictures, a folder for each class"),
            ("-m partitions=1,2 remat=full,none", "a sweep: four runs, one after another"),
        ),
    ),
    Command(
        name="bench",
        summary="measure speed and memory on this machine, beside other ways to train",
        module="gpipe_cli.commands.bench",
        examples=(
            ("", "a small AmoebaNet-D, twelve rows: about two minutes on two cores"),
            ("partitions=[1,2,4] remat=none baseline=torch trace=true", "your own grid, with timelines"),
            ("suite=table2", "the paper's table 2, where there are accelerators for it"),
        ),
        notes=(
            "exit codes: 0 all rows measured, but for those that cannot be (a line says why); 1 a row failed or ran "
            "out of memory; 2 refused, or no row can be measured",
            "model=transformer is measured on tokens; with a suite it is the paper's own, and the rows its columns",
        ),
    ),
    Command(
        name="transfer",
        summary="fine-tune a trained network on other pictures: a new head on its body",
        module="gpipe_cli.commands.transfer",
        examples=(
            ("dataset=cifar100 checkpoint=results/runs/RUN", "any run, checkpoint or exported safetensors file"),
            ("dataset=folder dataset.path=photos seeds=5", "the newest run of gpipe train; five runs, mean and spread"),
            ("dataset=cifar100 checkpoint=scratch", "the same without what was learnt before, to compare with"),
        ),
        notes=(
            "the head, the last layer with parameters (and the auxiliary one), begins anew; the rest is loaded bit for "
            "bit: a run with ema_decay gives its averaged weights, which it was evaluated with. A checkpoint brings "
            "its network along; model.KEY=VALUE changes what training may (dropout, drop_path)",
        ),
    ),
    Command(
        name="eval",
        summary="evaluate a checkpoint, export its weights, or let a language model write on",
        module="gpipe_cli.commands.eval",
        examples=(
            ("checkpoint=results/runs/RUN partitions=1", "accuracy by class on the held-out samples, uncut"),
            ("export=model.safetensors", "the newest run's weights as a file that a plain nn.Sequential loads"),
            ('prompt="Once upon a time" temperature=0.5', "text from the newest run of a language model"),
        ),
        notes=(
            "the checkpoint brings the network, the data set and the class names of its run; only what is listed here "
            "can be changed. Exit codes: 0 done, 1 failed on the way, 2 refused, nothing written",
        ),
    ),
    Command(
        name="plan",
        summary="predict memory and speed on other hardware",
        module="gpipe_cli.commands.plan",
        examples=(
            ("model=amoebanet_d hardware=p40 partitions=4 micro_batches=32", "stage by stage: memory, time, bubble"),
            ("model=amoebanet_b image_size=480 hardware=a100", "the fastest K and M that fit 8 such cards"),
            ("suite=table1", "every column of the paper's table 1, predicted beside reported"),
        ),
    ),
)

OPTIONS = {"-h": "help", "--help": "help", "-m": "multirun", "--multirun": "multirun", "--cfg": "cfg"}


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `gpipe` with the arguments (default: those of the process) and returns its exit code.

    Errors that a user can cause become one line on stderr; any other exception is a bug and passes through. It ends
    without a word when the reader of its output has gone.
    """
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except GpipeError as error:
        print(f"gpipe: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("gpipe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains while it exits
        return 141


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_overview(), file=sys.stderr)
        return 2
    first, rest = arguments[0], arguments[1:]
    if first in ("-h", "--help"):
        return _show(_overview())
    if first == "--version":
        return _show(f"gpipe {__version__}")
    command = {command.name: command for command in COMMANDS}.get(first)
    if command is None:
        raise _unknown_command(first)
    return _run(command, rest)


def _run(command: Command, arguments: list[str]) -> int:
    flags = {OPTIONS[word] for word in arguments if word in OPTIONS}
    words = [word for word in arguments if word not in OPTIONS]
    for word in words:
        if word.startswith("-"):
            problem = f"unknown option; gpipe {command.name} takes -m, --cfg, --help and settings written key=value"
            raise ConfigError(None, word, problem)
    if "help" in flags:
        from gpipe_cli.help import command_help

        return _show(command_help(command, words))
    try:
        jobs = _load(command, words, sweep="multirun" in flags)
    except ConfigError as error:
        if (
            os.environ.get("RANK", "0") != "0"
        ):  # every rank that torchrun started reads the same words: one of them speaks
            return error.exit_code
        raise
    if "cfg" in flags:
        from gpipe_cli.compose import resolved_yaml

        return _show("---\n".join(resolved_yaml(command.name, job) for job, _ in jobs).rstrip())
    if "multirun" in flags:
        from gpipe_cli.sweep import run_sweep

        return run_sweep(command.name, [job for job, _ in jobs])
    [(_, config)] = jobs
    return int(importlib.import_module(command.module).run(config))


def _load(command: Command, words: list[str], *, sweep: bool) -> list[tuple[list[str], Any]]:
    """The words and the checked configuration of every job: a sweep with one bad job starts none."""
    from gpipe_cli.compose import load

    if not sweep:
        return [(words, load(command.name, words))]
    from gpipe_cli.sweep import check_sweep, sweep_jobs

    jobs = [(job, load(command.name, job)) for job in sweep_jobs(words, command.name)]
    check_sweep([config for _, config in jobs])
    return jobs


def _overview() -> str:
    lines = ["usage: gpipe COMMAND [KEY=VALUE ...]", "", "Networks too big for one accelerator: pipeline parallelism."]
    lines += ["", "commands:", *(f"  {command.name:<10} {command.summary}" for command in COMMANDS)]
    lines += ["", "options:", "  -h, --help  this page; gpipe COMMAND --help has every setting", "  --version"]
    lines += ["", "example:", f"  gpipe {COMMANDS[0].name} {COMMANDS[0].examples[0][0]}"]
    return "\n".join(lines)


def _unknown_command(word: str) -> ConfigError:
    names = [command.name for command in COMMANDS]
    if "=" in word:
        return ConfigError(None, word, f"a command comes first: gpipe {names[0]} {word}")
    if word.startswith("-"):
        return ConfigError(None, word, "unknown option; gpipe takes --help and --version before a command")
    near = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ConfigError(None, word, f"unknown command; {hint}commands: {', '.join(names)}")


def _show(text: str) -> int:
    print(text, flush=True)
    return 0


def _nobody_reads(descriptor: int) -> bool:
    """Whether the reader of a pipe has gone (`gpipe bench | head -1`)."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
