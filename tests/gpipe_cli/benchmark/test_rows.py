"""Results as rows of the tables."""

from __future__ import annotations

import pytest

from gpipe_cli.benchmark.grid import grid
from gpipe_cli.benchmark.measure import Spell
from gpipe_cli.benchmark.results import Comparison, Result
from gpipe_cli.benchmark.rows import Origin, memory_row, throughput_row


@pytest.fixture
def row_of():
    def make(settings) -> dict[str, object]:
        [case] = grid(settings)
        spell = Spell(step_times_s=(0.5, 0.5), wait_s=0.25, num_bytes_sent=1, num_rematerializations=0)
        result = Result(case=case, spells=[[spell]])
        origin = Origin(machine="here", command_line="gpipe bench")
        return {**memory_row(settings, result, origin), **throughput_row(settings, result, Comparison(), origin)}

    return make


def test_text_has_a_length_and_tokens_a_second_where_pictures_have_a_size(row_of, config, text_config) -> None:
    text = row_of(text_config("partitions=2", "micro_batches=4", "remat=full"))
    assert (text["model"], text["layers"], text["filters"]) == ("transformer", 2, None)
    assert (text["seq_len"], text["image_size"], text["samples_per_s"], text["tokens_per_s"]) == (6, None, 16, 96)
    pictures = row_of(config("partitions=2", "micro_batches=4", "remat=full"))
    assert (pictures["seq_len"], pictures["image_size"], pictures["tokens_per_s"]) == (None, 8, None)


def test_what_is_measured_decides_whose_place_a_row_takes(row_of, text_config) -> None:
    words = ("partitions=2", "micro_batches=4", "remat=full")
    same = row_of(text_config(*words))["configuration"]
    assert row_of(text_config(*words, "steps=3"))["configuration"] == same
    assert row_of(text_config(*words, "model.seq_len=7"))["configuration"] != same
    assert row_of(text_config(*words, "model.tied=true"))["configuration"] != same
    tapered = row_of(text_config(*words, "taper=true"))
    assert (tapered["taper"], tapered["configuration"] == same) == ("tapered", False)
