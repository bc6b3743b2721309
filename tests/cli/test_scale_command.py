"""``trainer plan`` for several numbers of devices, from its command line to its file."""

from __future__ import annotations

import json

import pytest

from trainer.cli import run

A100 = ("--gpu", "a100-80gb")
HYBRID = ("--memory.strategy", "fsdp", "--memory.replicas", "2")
"""One strategy is left to simulate."""


def test_a_table_is_printed_and_written(tmp_path, capfd):
    argv = ["plan", "vit_digits", *A100, *HYBRID, "--devices", "16,128", "--interconnect", "100gbe", "--json"]
    assert run([*argv, "--out", str(tmp_path)]) == 0
    out, err = capfd.readouterr()
    content = json.loads(out)
    assert content == json.loads((tmp_path / "scale.json").read_text())
    one, sixteen, many = content["rows"]
    assert (one["devices"], one["strategy"], one["fits"]) == (1, "single", True)
    assert (sixteen["devices"], sixteen["nodes"], sixteen["strategy"]) == (16, 2, "hsdp")
    assert sixteen["over"]["100gbe"]["efficiency"] < 1
    assert sixteen["leaving_a_node_gb"] > 0
    assert (many["devices"], many["fits"]) == (128, False)
    assert "it takes --batch_size 128 or more" in many["reason"]
    parts = ["1/2 · single on 1", "batch    64 samples", "100gbe", "devices  nodes  strategy", "- over 100gbe: hsdp"]
    places = [err.find(part) for part in [*parts, "- not simulated: 128 devices", "- assumed:", "files: "]]
    assert -1 not in places, err
    assert places == sorted(places)
    assert max(map(len, err.split("files:")[0].splitlines())) <= 120
    assert run([*argv, "--out", str(tmp_path)]) == 2  # which holds a table already
    assert f"--out={tmp_path} already holds a scale" in capfd.readouterr().err


def test_a_table_without_a_row_that_fits_ends_with_1(tmp_path, capfd):
    argv = ["plan", "vit_digits", *A100, "--per-node", "4", "--memory.budget", "1MB", "--out", str(tmp_path)]
    assert run(argv) == 1
    out, err = capfd.readouterr()
    assert "single does not fit" in out
    assert "trainer: error: nothing fits on any of these numbers of devices" in err


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--devices", "1,x"], ["--devices='x'", "integer of at least 1"]),
        (["--devices", "1,8,8"], ["--devices=1,8,8", "twice"]),
        (["--devices", "8,12"], ["--devices=12", "multiple of --per-node=8"]),
        (["--devices", "8,12", "--per-node", "0"], ["--per-node='0'"]),
        (["--devices", "8,16", "--nodes", "1,2,4"], ["--nodes=1,2,4", "as many as --devices=8,16"]),
        (["--devices", "8,16", "--nodes", "1,3"], ["--devices=16", "multiple of --nodes=3"]),
        (["--devices", "8,16", "--nodes", "2", "--per-node", "8"], ["--nodes and --per-node"]),
        (["--devices", "8", "--interconnect", "ib-hd"], ["--interconnect=ib-hd", "did you mean ib-hdr?"]),
        (["--devices", "8,16", "--lossy", "true"], ["--lossy"]),
        (["--devices", "8,16", "--memory.cpu_offload", "auto"], ["memory.cpu_offload=auto", "--devices 16"]),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_line(flags, parts, capsys):
    assert run(["plan", "vit_digits", *A100, *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert [part for part in parts if part not in err] == [], err
