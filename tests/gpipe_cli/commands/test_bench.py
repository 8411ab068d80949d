"""`gpipe bench` as a user sees it: rows, tables, pictures, exit codes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from gpipe_cli.cli import main

TINY = (
    "image_size=8", "batch_size=8", "num_classes=4", "steps=2", "rounds=2", "threads=1", "device=cpu", "progress=plain",
    "model.layers=2", "model.filters=4", "model.split_cells=false",
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def ours(name: str) -> list[dict[str, str]]:
    with Path("results", f"{name}.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["kind"] == "measured"]


def test_rows_baselines_tables_plot_and_traces(capfd, monkeypatch) -> None:
    # The plain loop would have all cores, whose threads get in one another's way when the machine is busy.
    monkeypatch.setattr("gpipe_cli.distributed.devices.available_cores", lambda: 1)
    words = ["partitions=[1,2]", "micro_batches=[4,16]", "remat=full", "trace=true", "run_dir=traces"]
    monkeypatch.setattr("sys.argv", ["gpipe", "bench", *TINY, *words])
    assert main(["bench", *TINY, *words]) == 0
    out = capfd.readouterr().out
    assert out.count("not measured: ") == 2
    assert "not measured: K=2 M=16 remat=full: there are only batch_size=8 samples" in out

    rows = {(row["baseline"], row["partitions"]): row for row in ours("throughput")}
    assert rows.keys() == {("", "1"), ("", "2"), ("single", "1"), ("naive", "2"), ("torch", "2")}
    two = rows["", "2"]
    assert (two["micro_batches"], two["batch_size"], two["device"], two["world_size"]) == ("4", "8", "cpu", "2")
    assert (two["warmup_steps"], two["steps"], two["threads"]) == ("2", "2", "1")
    assert float(two["samples_per_s"]) * float(two["step_time_s"]) == pytest.approx(8, rel=1e-3)
    assert float(two["step_time_low_s"]) <= float(two["step_time_s"]) <= float(two["step_time_high_s"])
    assert all(float(two[name]) > 0 for name in ("ratio_single", "ratio_naive", "ratio_torch", "speedup"))
    assert two["speedup_over"] == "K=1 M=4"
    assert len(two["bubble_fraction_per_rank"].split()) == len(two["num_bytes_sent_per_rank"].split()) == 2
    assert two["num_rematerializations"] == "6"  # all but the last micro-batch, on two stages
    assert two["machine"]
    assert two["command_line"].startswith("gpipe bench ")
    assert rows["torch", "2"]["balance"] == two["balance"]
    assert rows["torch", "2"]["layout"] in ("nchw", "channels-last inside")

    memory = {(row["baseline"], row["partitions"]): row for row in ours("memory")}
    assert memory.keys() == rows.keys()
    assert int(memory["", "1"]["activation_bytes"]) < int(memory["single", "1"]["activation_bytes"])
    page = Path("results/throughput.md").read_text()
    assert "torchgpipe, docs/benchmarks.rst" in page
    assert "arXiv 1811.06965, table 2" in page
    assert Path("results/speedup.png").stat().st_size > 1000

    trace = json.loads(Path("traces/k2-m4-full-gpipe.json").read_text())
    boxes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {box["tid"] for box in boxes} == {0, 1}
    assert len(boxes) == 8 + 8 + 6
    assert all(box["dur"] > 0 for box in boxes)
    assert Path("traces/k2-m4-full-gpipe.png").read_bytes().startswith(b"\x89PNG")
    assert Path("traces/config.yaml").exists()


def test_a_transformer_is_measured_in_tokens_beside_every_baseline(capfd, monkeypatch) -> None:
    monkeypatch.setattr("gpipe_cli.distributed.devices.available_cores", lambda: 1)
    tiny = ["batch_size=8", "steps=2", "rounds=2", "threads=1", "device=cpu", "progress=plain", "model.layers=2"]
    words = ["model=transformer", *tiny, "model.width=16", "model.ff_width=32", "model.seq_len=12"]
    assert main(["bench", *words, "partitions=[1,2]", "micro_batches=4", "remat=full"]) == 0
    out = capfd.readouterr().out
    assert "transformer of 2 blocks, sequences of 12 tokens, batch 8, fp32, adam;" in out
    rows = {(row["baseline"], row["partitions"]): row for row in ours("throughput")}
    assert rows.keys() == {("", "1"), ("", "2"), ("single", "1"), ("naive", "2"), ("torch", "2")}
    for row in rows.values():
        assert (row["model"], row["layers"], row["filters"], row["image_size"]) == ("transformer", "2", "", "")
        assert (row["seq_len"], row["layout"], row["optimizer"]) == ("12", "", "adam")
        assert float(row["tokens_per_s"]) == pytest.approx(12 * float(row["samples_per_s"]), rel=1e-3)
        assert row["num_parameters"] == rows["single", "1"]["num_parameters"]
    assert all(float(rows["", "2"][name]) > 0 for name in ("ratio_single", "ratio_naive", "ratio_torch", "speedup"))
    assert rows["torch", "2"]["balance"] == rows["", "2"]["balance"]
    memory = {(row["baseline"], row["partitions"]): row for row in ours("memory")}
    assert int(memory["", "1"]["activation_bytes"]) < int(memory["single", "1"]["activation_bytes"])
    assert Path("results/speedup-text.png").stat().st_size > 1000
    assert not Path("results/speedup.png").exists()


def test_measuring_again_replaces_the_rows(capfd) -> None:
    words = ["bench", *TINY, "partitions=1", "micro_batches=2", "remat=none", "baseline=null"]
    assert main(words) == 0
    assert main(words) == 0
    assert len(ours("throughput")) == 1
    assert not Path("results/speedup.png").exists()  # one number of partitions: nothing to compare
    assert len([line for line in capfd.readouterr().out.splitlines() if line.startswith("gpipe ")]) == 2


def test_a_failed_row_makes_the_exit_code_1_and_the_rest_goes_on(capfd, tmp_path, monkeypatch) -> None:
    (tmp_path / "users_odd_layers.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Greedy(nn.Linear):\n"
        "    def forward(self, value):\n"
        "        if torch.distributed.is_initialized():\n"
        "            raise torch.OutOfMemoryError('no room')\n"
        "        return super().forward(value)\n"
        "def layers():\n"
        "    return [('flatten', nn.Flatten), ('greedy', lambda: Greedy(192, 4)), ('relu', nn.ReLU)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["model=module", "model.factory=users_odd_layers:layers", "partitions=[2,1]", "micro_batches=2"]
    tiny = [word for word in TINY if not word.startswith("model.")]
    assert main(["bench", *tiny, *words, "remat=none", "baseline=null"]) == 1
    out = capfd.readouterr().out
    assert "failed: K=2 M=2 remat=none: out of memory on cpu: no room" in out
    assert [row["partitions"] for row in ours("throughput")] == ["1"]
    assert {row["partitions"]: row["outcome"] for row in ours("memory")} == {"1": "", "2": "out of memory"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["suite=table9"], "suite=table9: choose one of table1, table2, table3, torchgpipe; did you mean table3?"),
        (["partitions=[2,x]"], "partitions=[2,x]: expected a whole number, 1 or more; or a list of them, or null"),
        (["warmup_steps=1"], "warmup_steps=1: expected a whole number, 2 or more"),
        (["rounds=7"], "rounds=7: there are only steps=6 to divide; use rounds=6 or less, or more steps"),
        (["balance=[3,3]"], "balance=[3,3]: names 2 partitions; add partitions=2, or leave balance out"),
        (
            ["model=transformer", "image_size=64"],
            "image_size=64: model=transformer reads text of model.seq_len=128 tokens, no pictures; leave it out",
        ),
        (
            ["model=transformer", "num_classes=10"],
            "num_classes=10: model=transformer tells model.vocab_size=256 tokens apart; leave it out",
        ),
        (
            ["model=transformer", "suite=torchgpipe"],
            "suite=torchgpipe: has no columns for model=transformer; use suite=table2 or suite=table3",
        ),
        (["run_dir=x"], "run_dir=x: holds the traces; add trace=true, or leave it out"),
    ],
)
def test_a_refused_setting_is_one_line_and_writes_nothing(words, line, capfd, folder) -> None:
    assert main(["bench", *words]) == 2
    assert capfd.readouterr().err == f"gpipe: error: {line}\n"
    assert list(folder.iterdir()) == []


def test_when_no_row_can_be_measured_the_exit_code_is_2(capfd) -> None:
    assert main(["bench", *TINY, "partitions=30", "micro_batches=1", "remat=none"]) == 2
    output = capfd.readouterr()
    assert output.out == "not measured: K=30 M=1 remat=none: the network has only 6 layers to cut into partitions\n"
    assert output.err == "gpipe: error: no row can be measured here; the lines above say why\n"


def test_it_is_not_for_torchrun(monkeypatch, capfd) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", *TINY]) == 2
    assert "without torchrun" in capfd.readouterr().err
