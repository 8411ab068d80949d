"""`gpipe train --help` lists every group, choice and key with its value and meaning."""

from __future__ import annotations

import shlex

import pytest

from gpipe_cli.catalogue import group_choices, typed_keys
from gpipe_cli.cli import COMMANDS
from gpipe_cli.compose import load
from gpipe_cli.errors import ConfigError
from gpipe_cli.help import command_help
from gpipe_cli.overrides import expand_sweep


def page(*words: str) -> str:
    return " ".join(command_help(COMMANDS[0], words).split())


def test_every_group_and_choice_and_key_is_on_the_page_with_its_meaning() -> None:
    text = page()
    for group, choices in group_choices().items():
        assert group in text
        assert all(choice in text for choice in choices)
    for key, field, _ in typed_keys():
        if not key.endswith(".name"):
            assert key in text
            assert " ".join(field.metadata["help"].split()) in text


def test_values_are_those_that_the_other_words_lead_to() -> None:
    assert "partitions=1 " in page()
    text = page("model=amoebanet_b", "dataset=imagenet", "partitions=8")
    assert "model.filters=512" in text
    assert "partitions=8 " in text
    assert "image_size=480" in text


def test_a_key_of_another_choice_says_with_which_it_works() -> None:
    meaning = "dataset.download fetch the data into dataset.path when they are not there [only with "
    assert f"{meaning}dataset=cifar10 or cifar100 or fgvc_aircraft or food101 or oxford_pets]" in page()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_page_teaches_with_three_examples_that_compose(command) -> None:
    assert len(command.examples) == 3
    for arguments, _ in command.examples:
        assert f"gpipe {command.name} {arguments}".rstrip() in " ".join(command_help(command, ()).split())
        for words in expand_sweep([word for word in shlex.split(arguments) if word != "-m"]):
            load(command.name, words)


def test_lines_fit_a_terminal_of_eighty_columns(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        examples = {f"  gpipe {command.name} {arguments}" for arguments, _ in command.examples}
        assert all(len(line) <= 80 for line in command_help(command, ()).splitlines() if line not in examples)


def test_help_for_words_that_do_not_compose_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean partitions"):
        page("partitons=4")
