"""benchmarks/gpu.py first: what it makes of runs, packages and logs, without a GPU."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.benchmark import imported

from trainer.lab.measured_run import Trial

common, gpu_faults, gpu_first = imported("common", "gpu_faults", "gpu_first")
First, Task = gpu_first.First, gpu_first.Task
CARD = {"gpu": {"bandwidth": 1e12, "flops": {}}, "name": "a card"}


def rows_of(folder: Path, *tasks: Any, seconds: float = math.inf, is_dry: bool = False) -> list[dict[str, Any]]:
    """The rows of some tasks, as they are in the file."""
    record = common.Record("gpu_first", {}, folder)
    end = seconds if math.isinf(seconds) else time.monotonic() + seconds
    gpu_first.measure([(2, tasks)], record, end, not is_dry)
    return json.loads((folder / "gpu_first.json").read_text())["rows"]


def right(seconds: float) -> dict[str, Any]:
    return {"status": "finished", "reason": f"{seconds:g} s", "met": True}


def test_whatever_becomes_of_a_row_is_written_in_the_order_of_the_rows(tmp_path):
    broken = Task("broken", 9, lambda seconds: 1 / 0)
    rows = rows_of(tmp_path, broken, Task("right", 9, right), Task("card", 9, right, needs_gpu=True), is_dry=True)
    assert [(row["name"], row["status"], row["met"]) for row in rows] == [
        ("broken", "failed", False),
        ("right", "finished", True),
        ("card", "not run", None),
    ]
    assert rows[0]["reason"].startswith("ZeroDivisionError")
    assert rows[1]["reason"] == "9 s"


def test_a_row_without_time_says_so(tmp_path):
    (row,) = rows_of(tmp_path, Task("late", 9, right), seconds=1)
    assert (row["status"], row["met"]) == ("not run", None)
    assert "late" in row["reason"]


def test_missing_packages_and_tools_are_rows(tmp_path, monkeypatch):
    first = First(CARD, tmp_path)
    monkeypatch.setattr(gpu_first, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_faults, "find_spec", lambda name: None if name == "hypothesis" else True)
    monkeypatch.setattr(gpu_first.shutil, "which", lambda name: None)
    monkeypatch.setattr(gpu_first, "TOOL", tmp_path / "none")
    qlora = gpu_first.WORKLOADS[-1]
    found = [first.speed(qlora, gpu_first.THEIRS, 9), first.tests(9), first.sanitized("memcheck", "nf4", 9)]
    assert [(row["status"], row["met"]) for row in found] == [("not run", None)] * 3
    assert found[0]["reason"] == "not installed: bitsandbytes, peft"
    assert found[1]["reason"].startswith("hypothesis: not installed")
    assert found[2]["reason"] == "compute-sanitizer is not installed"


@pytest.mark.parametrize(
    ("log", "kernels", "met", "said"),
    [
        ("", ["void pytorch_flash::flash_fwd_kernel<>"], True, "0 calls of cuDNN; kernels: void"),
        ("SDPA Cache Called 9 times. Hit rate: 12.5%\n", ["flash_fwd"], False, "9 calls of cuDNN, 12.5 % of them"),
        ("", ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop"], False, "0 calls of cuDNN; kernels: cudnn"),
        ("", ["gemm"], None, "the trace shows no attention"),
    ],
)
def test_packed_texts_must_not_reach_cudnn(log, kernels, met, said, tmp_path, monkeypatch):
    def trained(arguments: list[str], run_dir: Path, **options: Any) -> Trial:
        assert options["environment"] == {"TORCH_CUDNN_SDPA_CACHE_DEBUG": "1"}
        run_dir.with_suffix(".log").write_text(log)
        events = [{"cat": "kernel", "name": name} for name in kernels] + [{"cat": "cpu_op", "name": "aten::sdpa"}]
        (tmp_path / "packed.trace.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        return Trial("finished", None, [], 1.0)

    monkeypatch.setattr(gpu_first, "run_trial", trained)
    found = First(CARD, tmp_path).packed(9)
    assert (found["met"], found["status"]) == (met, "finished")
    assert said in found["reason"]


@pytest.mark.parametrize(
    ("bits", "met", "said"),
    [
        ({"0": "same", "1": "same"}, True, "weights: equal; run twice: equal"),
        ({"0": "same", "1": "other"}, False, "weights: not equal; run twice: equal"),
    ],
)
def test_a_race_is_weights_that_depend_on_waiting(bits, met, said, tmp_path, monkeypatch):
    def trained(arguments: list[str], run_dir: Path, **options: Any) -> Trial:
        (run_dir / "model").mkdir(parents=True)
        weights = bits[options["environment"]["CUDA_LAUNCH_BLOCKING"]]
        (run_dir / "model" / "model.safetensors").write_text(weights)
        return Trial("finished", None, [], 1.0)

    monkeypatch.setattr(gpu_first, "run_trial", trained)
    found = First(CARD, tmp_path).race({"memory.cpu_offload": "optimizer"}, 9)
    assert (found["met"], found["reason"]) == (met, said)


def test_speed_stands_beside_that_of_transformers(tmp_path, monkeypatch):
    def timed(first: Any, kind: str, name: str, options: Any, arguments: Any, seconds: float) -> dict[str, Any]:
        ours = "--who=ours" in options
        assert ("--memory.cpu_offload=optimizer" in arguments) == (ours and "language_model-2" in name)
        return {"status": "finished", "reason": None, "seconds": 1.0 if ours else 2.0, "peak": 2e9}

    monkeypatch.setattr(First, "child", timed)
    monkeypatch.setattr(gpu_first, "find_spec", lambda name: True)
    monkeypatch.setattr(gpu_first.Benchmark, "_tokenizer", lambda benchmark, words: tmp_path)
    first = First(CARD, tmp_path)
    tasks = [Task(f"{load.name}: {who}", 9, lambda s, load=load, who=who: first.speed(load, who, s))
             for load in gpu_first.WORKLOADS for who in gpu_first.WHO]  # fmt: skip
    rows = rows_of(tmp_path, *tasks)
    shown = gpu_first.report(rows)
    assert rows[0]["per_second"] == 64 * 14
    for load in gpu_first.WORKLOADS:
        (line,) = [line for line in shown.splitlines() if line.startswith(f"| {load.name}, {load.unit}/s")]
        assert [cell.strip() for cell in line.split("|")[4:7]] == ["2.00", "2.0", "2.0"]


def test_counts_of_tests_are_those_so_far(tmp_path, monkeypatch):
    lines = ["tests/gpu/test_a.py::test_one PASSED [ 25%]", "tests/gpu/test_a.py::test_two[x y] FAILED [ 50%]"]
    lines += ["tests/gpu/test_a.py::test_three SKIPPED (no) [ 75%]"]

    class Ended:
        def __init__(self, command: Any, environment: Any, stdout: Any, **streams: Any) -> None:
            stdout.write("\n".join(lines) + "\n")
            self.process = self

        def wait(self, seconds: float) -> int:
            raise subprocess.TimeoutExpired("pytest", seconds)

        def kill(self) -> None: ...

    monkeypatch.setattr(gpu_faults, "ProcessSession", Ended)
    found = gpu_faults.run_tests(["tests/gpu"], 1.0, tmp_path / "tests.log")
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert (found["status"], found["met"]) == ("late", False)
    assert found["failed"] == ["tests/gpu/test_a.py::test_two[x y]"]
    assert found["reason"] == "the time was up after 3 tests"


@pytest.mark.slow
def test_a_dry_run_times_a_kernel_on_the_cpu(tmp_path):
    assert gpu_first.main(["--dry", "--only", "NF4 to", "--results", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "gpu_first_dry.json").read_text())["rows"]
    assert (row["status"], row["has_kernel"], row["met"]) == ("finished", False, None)
    assert row["operations"]["gb_per_second"] > 0


@pytest.mark.slow
def test_a_dry_run_does_all_of_it(tmp_path):
    assert gpu_first.main(["--dry", "--time", "5", "--results", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "gpu_first_dry.json").read_text())
    status = {row["name"]: row["status"] for row in content["rows"]}
    left_out = [name for name in status if "compute-sanitizer" in name]
    assert content["complete"] is True
    assert len(status) == 20
    assert [name for name, one in status.items() if one != "finished"] == left_out
    for load in gpu_first.WORKLOADS:
        for who in gpu_first.WHO:
            assert next(row for row in content["rows"] if row["name"] == f"{load.name}: {who}")["per_second"] > 0
