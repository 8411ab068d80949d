"""`gpipe COMMAND --help`: the groups with their choices, and every setting with its value, meaning and limits.

Values are those that the given words lead to, so `gpipe train model=amoebanet_b --help` shows that network's.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpipe_cli.catalogue import choices_with_key, group_choices, typed_keys
from gpipe_cli.compose import compose
from gpipe_cli.config import config_class
from gpipe_cli.errors import as_typed
from gpipe_cli.fields import allowed

if TYPE_CHECKING:
    from gpipe_cli.cli import Command

_INDENT = 36  # column where the meaning begins
_OBVIOUS = ("text", "true or false", "KEY=VALUE")  # limits that the value and its meaning already show
_GROUP_HELP = {
    "model": "the network",
    "dataset": "the data",
    "optimizer": "the optimizer",
    "lr_schedule": "the learning rate over the epochs",
    "recipe": "the values of a pair, taken by itself for DATASET_MODEL (fine-tuning: transfer_MODEL); recipe=null: not",
    "hardware": "what it is planned for; cpu: this machine, measured",
    "suite": "the rows of a table of the paper, or of torchgpipe's benchmark; none by default",
    "experiment": "a named experiment of the paper or its authors; none by default",
}


def command_help(command: Command, words: Sequence[str]) -> str:
    """The whole page. Raises ConfigError when the words cannot be composed."""
    values = compose(command.name, words)
    lines = [f"usage: gpipe {command.name} [-m] [--cfg] [KEY=VALUE ...]", "", f"{command.summary.capitalize()}."]
    lines += ["", "examples:"]
    for arguments, meaning in command.examples:
        lines += [f"  gpipe {command.name} {arguments}".rstrip(), f"      {meaning}"]
    lines += ["", "options:"]
    lines += _row(
        "-m, --multirun", "a sweep: every combination of key=1,2 is a run; exits with the first failure's code"
    )
    lines += _row("--cfg", "print the resolved configuration and stop")
    lines += _row("-h, --help", "this page, with the values that the other arguments lead to")
    for note in command.notes:
        lines += ["", *textwrap.wrap(note, _width())]
    groups = group_choices(command.name)
    lines += ["", "groups, chosen by GROUP=NAME:"] if groups else []
    for group, choices in groups.items():
        lines += _row(f"{group}", f"{_GROUP_HELP.get(group, '')}: {', '.join(choices)}")
    lines += ["", "settings, KEY=VALUE (of a key that is given twice the last one counts):"]
    section = ""
    for key, field, hint in sorted(typed_keys(config_class(command.name)), key=lambda setting: "." in setting[0]):
        group, _, name = key.rpartition(".")
        if name == "name" or key in group_choices(command.name):  # the choice of the group
            continue
        if group != section:
            lines.append("")
            section = group
        limits = allowed(hint, field.metadata)
        lines += _setting(key, field.metadata["help"], limits, values[group] if group else values)
    return "\n".join(lines)


def _setting(key: str, meaning: str, limits: str, values: Mapping[str, Any]) -> Iterator[str]:
    group, _, name = key.rpartition(".")
    notes = [] if limits.startswith(_OBVIOUS) else [limits]
    if name in values:
        left = f"{key}={as_typed(values[name])}"
    else:
        left = key
        notes.append(f"only with {group}={' or '.join(choices_with_key(group, name))}")
    return _row(left, f"{meaning} [{'; '.join(notes)}]" if notes else meaning)


def _width() -> int:
    return max(72, min(shutil.get_terminal_size().columns, 120))


def _row(left: str, right: str) -> Iterator[str]:
    wrapped = textwrap.wrap(right, _width() - _INDENT, break_on_hyphens=False) or [""]
    if len(left) + 2 >= _INDENT:
        yield f"  {left}"
    else:
        yield f"  {left}".ljust(_INDENT) + wrapped.pop(0)
    for line in wrapped:
        yield " " * _INDENT + line
