"""From the configuration to named layers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.compose import load
from gpipe_cli.config import ModelConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.layers import named_layers
from gpipe_cli.training.networks import build_network


def model(*words: str) -> ModelConfig:
    return load("train", words).model


def names(layers: Any) -> list[str]:
    return [layer.name for layer in named_layers(layers)]


UNSPLIT = ("model.split_cells=false",)


def test_cells_are_two_layers_unless_they_are_not_to_be_split() -> None:
    split, whole = (names(build_network(model("model.layers=2", *words), 10, 16, 0)) for words in ((), UNSPLIT))
    assert whole == ["stem", "reduction_0", "normal_0", "reduction_1", "normal_1", "classifier"]
    assert split == ["stem", *(part for name in whole[1:-1] for part in (name, f"{name}_end")), "classifier"]


@pytest.mark.parametrize(
    ("words", "image_size", "stem_cells"),
    [((), 63, 0), ((), 64, 2), (("model.stem=imagenet",), 32, 2), (("model.stem=small",), 224, 0)],
)
def test_the_stem_follows_the_size_of_the_pictures_unless_it_is_chosen(
    words: tuple[str, ...], image_size: int, stem_cells: int
) -> None:
    layers = build_network(model("model.layers=2", "model.split_cells=false", *words), 10, image_size, 0)
    assert sum(name.startswith("stem_cell") for name in names(layers)) == stem_cells


def test_settings_reach_the_network() -> None:
    layers = build_network(model("model.layers=3", "model.aux_head=true", "model.dropout=0.25"), 7, 16, 0)
    assert "aux_head" in names(layers)
    classifier = dict(layers)["classifier"]()
    assert classifier.linear.out_features == 7
    assert classifier.dropout.p == 0.25


def test_building_the_list_builds_no_layer() -> None:
    layers = build_network(model("model.layers=18", "model.filters=2048"), 1000, 32, 0)  # gigabytes, if it were built
    assert all(not isinstance(layer, torch.nn.Module) for _, layer in layers)


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Writes a user's module into the current folder and gives its configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"users_{abs(hash(request.node.nodeid))}"

    def write(source: str, *words: str) -> ModelConfig:
        Path(f"{name}.py").write_text(source)
        return model("model=module", f"model.factory={name}:layers", *words)

    return write


def test_a_users_function_gets_what_it_asks_for(users: Any) -> None:
    config = users(
        "from torch import nn\n"
        "def layers(num_classes, image_size, width=1):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, width), nn.Linear(width, num_classes))\n",
        "model.kwargs.width=5",
    )
    layers = build_network(config, 7, 4, 0)
    assert [layers[1].in_features, layers[1].out_features, layers[2].out_features] == [48, 5, 7]


def test_every_rank_gets_the_same_modules_and_the_generator_stays(users: Any) -> None:
    config = users("from torch import nn\ndef layers():\n    return nn.Sequential(nn.Linear(3, 3))\n")
    before = torch.random.get_rng_state()
    one, same, other = (build_network(config, 10, 8, seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one[0].weight, same[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)


def test_a_module_that_needs_another_one_says_which(users: Any) -> None:
    config = users("import package_that_is_not_there\n")
    with pytest.raises(ConfigError, match="needs the module package_that_is_not_there, which is not installed"):
        build_network(config, 10, 8, 0)


def test_arguments_are_checked_against_the_function(users: Any) -> None:
    config = users("def layers(depth):\n    return None\n")
    with pytest.raises(ConfigError, match=r"model\.kwargs=\{\}: .* missing a required argument: 'depth'; it has depth"):
        build_network(config, 10, 8, 0)


def test_an_empty_network_is_refused(users: Any) -> None:
    config = users("def layers():\n    return []\n")
    with pytest.raises(ConfigError, match="the network has no layers"):
        build_network(config, 10, 8, 0)
