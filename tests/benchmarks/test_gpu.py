"""benchmarks/gpu.py with small models on the CPU: all of it but the GPU's own figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def benchmark(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_without_a_gpu_there_is_nothing_to_measure(tmp_path):
    done = benchmark("--results", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no CUDA device" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_rows_are_measured_compared_and_kept(tmp_path):
    only = "uncapped,under 2 GB,DistilBERT"
    done = benchmark(
        *("caps", "text", "--accelerator", "cpu", "--tiny", "--steps", 2, "--only", only),
        *("--results", tmp_path / "results", "--work", tmp_path / "work"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "results" / "gpu.json").read_text())
    assert content["complete"] is True
    base, capped = content["parts"]["caps"]
    assert (base["name"], capped["name"]) == ("bf16-mixed, uncapped", "under 2 GB")
    assert base["status"] == capped["status"] == "finished", capped
    assert "capped.py" in capped["command"]
    assert (capped["target"], capped["cap_gb"]) == ({"kind": "reserved", "gb": 2.0, "published": False}, 2.0)
    assert capped["loss_difference"] < 0.01
    assert capped["met"] is False  # nothing is reserved on a CPU: a target is not met by what was not measured
    text = content["parts"]["text"][0]
    assert text["plan"].startswith("batch 12 = 1 rank × 1 micro-batch of 12")
    assert text["samples_per_second"] > 0
    assert "| under 2 GB" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lader"], "no part lader"),
        (["--accelerator", "cpu"], "use it with --tiny"),
        (["--only", "nothing"], "no row has such a name"),
        (["--steps", "1"], "--steps must be at least 2"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, message):
    done = benchmark(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
