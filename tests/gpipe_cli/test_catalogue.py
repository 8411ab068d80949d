"""What can be set, read off conf/ and the config dataclasses."""

from __future__ import annotations

from gpipe_cli.catalogue import choices_with_key, group_choices, keys_of_choice, text_keys, typed_keys


def test_groups_are_the_folders_of_conf() -> None:
    assert set(group_choices()) == {"model", "dataset", "optimizer", "lr_schedule", "recipe", "experiment"}
    assert {"amoebanet", "amoebanet_b", "amoebanet_d", "module", "transformer"} <= set(group_choices()["model"])
    assert list(group_choices()["model"]) == sorted(group_choices()["model"])


def test_a_preset_has_the_keys_of_the_file_that_it_builds_on() -> None:
    assert keys_of_choice("model", "amoebanet_b") == keys_of_choice("model", "amoebanet")
    assert keys_of_choice("model", "transformer_84b") == keys_of_choice("model", "transformer")


def test_choices_with_a_key_are_those_whose_file_lists_it() -> None:
    downloaded = ("cifar10", "cifar100", "fgvc_aircraft", "food101", "oxford_pets")
    assert choices_with_key("dataset", "download") == downloaded


def test_keys_are_dotted_and_leave_the_command_out() -> None:
    keys = [key for key, _, _ in typed_keys()]
    assert {"partitions", "model.layers", "optimizer.lr"} <= set(keys)
    assert "command" not in keys
    assert len(keys) == len(set(keys))


def test_paths_are_text_and_choices_are_not() -> None:
    assert {"run_dir", "dataset.path", "resume"} <= text_keys()
    assert not {"device", "partitions", "balance"} & text_keys()
