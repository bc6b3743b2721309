"""``benchmarks/gpu.py planner``: all of it but the GPU's own figures, with small models on the CPU."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import time

import pytest
from helpers.benchmark import FOLDER, imported
from helpers.plain_allocator import PlainAllocator
from helpers.warm import python

from trainer.memory.plan import decide_plan

common, planner_runs, recorded_run = imported("common", "planner_runs", "recorded_run")
planner_configs, planner_report = imported("planner_configs", "planner_report")
CASES, TINY, Runs, file_name = planner_configs.CASES, planner_configs.TINY, planner_runs.Runs, planner_runs.file_name


@pytest.mark.slow
def test_small_models_are_predicted_run_and_compared(tmp_path):
    out = tmp_path / "results" / "found.json"
    arguments = ("planner", "--accelerator", "cpu", "--tiny", "--out", out, "--work", tmp_path / "work")
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = python(FOLDER / "gpu.py", *arguments, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert (content["benchmark"], content["complete"], content["gpu"]["gpu"]["name"]) == ("planner", True, "h200")
    text = json.dumps(content["predictions"], sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == content["predictions_sha256"]
    names = [case.name for case in TINY]
    assert [row["name"] for row in content["rows"]] == names
    for case in TINY:
        predicted, measured = content["predictions"][case.name]["prediction"], content["measured"][case.name]
        assert 0 < predicted["allocated"] <= predicted["reserved"]
        assert (measured["status"], measured["steps"], measured["skipped_steps"]) == ("finished", 3, 0), measured
        assert measured["plan"].removesuffix(" on CPU") == predicted["plan"]
        assert (measured["reserved"], measured["allocated"], measured["recording"]) == (None, None, None)
    assert measured["memory"]["host_peak_gb"] > 0
    assert content["measured"][names[1]]["plan"].startswith("batch 16 = 8 ranks × 1 micro-batch of 2, fsdp")
    assert sum(content["predictions"][names[0]]["requests"].values()) > 100
    assert "reserved: nothing was measured" in done.stdout


def test_late_predictions_leave_those_that_were_made(tmp_path, monkeypatch):
    made = tmp_path / "predicted.json"

    class Late(subprocess.Popen):
        """The time is up as soon as there is a prediction."""

        def wait(self, timeout=None):
            while timeout is not None and self.poll() is None:
                if made.is_file() and made.read_text():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.02)
            return super().wait()

    script = "import pathlib, sys, time\npathlib.Path(sys.argv[2]).write_text('{\"one\": {}}')\ntime.sleep(3000)\n"
    (tmp_path / "predict_cases.py").write_text(script)
    monkeypatch.setattr(planner_runs, "HERE", tmp_path)
    monkeypatch.setattr(subprocess, "Popen", Late)
    assert Runs("cpu", tmp_path, tmp_path, time.monotonic()).predict([], {}) == {"one": {}}
    made.unlink()
    (tmp_path / "predict_cases.py").write_text("raise SystemExit(3)")
    with pytest.raises(subprocess.CalledProcessError):
        Runs("cpu", tmp_path, tmp_path, time.monotonic()).predict([], {})


# --------------------------------------------------------------------------------------------------- configurations


@pytest.mark.slow
def test_a_configuration_has_a_name_of_its_own_and_is_a_recipe_that_can_work(tmp_path):
    assert len({file_name(case.name) for case in CASES}) == len(CASES)
    for case in CASES:
        assert "," not in case.name  # --only has them between words
        recipe = common.resolve(Runs("cuda", tmp_path, tmp_path, 0).arguments(case))
        plan = decide_plan(recipe, case.ranks)
        assert (plan.world_size, case.ranks == 1 or plan.strategy == "fsdp") == (case.ranks, True), case.name
        assert recipe.max_steps in (3, 8), case.name


# ----------------------------------------------------------------------------------------------------------- report


def outcome(reserved, allocated, recording=None):
    return {"status": "finished", "reserved": reserved, "allocated": allocated, "recording": recording}


def test_errors_are_relative_to_what_was_measured():
    predictions = {
        "a": {"prediction": {"reserved": 102, "allocated": 100}},
        "b": {"prediction": {"reserved": 193, "allocated": 200}},
        "c": {"prediction": {"error": "cannot be traced"}},
        "d": {"prediction": {"reserved": 100, "allocated": 100}},
    }
    measured = {"a": outcome(100, 100), "b": outcome(200, 200), "c": outcome(100, 100)}
    rows = planner_report.compared("abcd", predictions, measured)
    assert [row["reserved"]["error"] for row in rows] == [pytest.approx(0.02), pytest.approx(-0.035), None, None]
    assert [row["status"] for row in rows] == ["finished", "finished", "not predicted: cannot be traced", "not run"]
    found = planner_report.summed_up(rows, measured)
    reserved = found["reserved"]
    assert (reserved["median"], reserved["worst"]) == (pytest.approx(0.0275), pytest.approx(0.035))
    assert (reserved["worst_name"], reserved["under_predicted"]) == ("b", ["b"])
    assert reserved["met"] == {"median": True, "worst": True, "under": False}
    assert found["allocated"]["met"] == {"median": True, "worst": True, "under": True}
    text = planner_report.report(rows, found, measured)
    assert "| -3.5 % |" in " ".join(text.split())
    assert "1 of 2 more than 3% too low (goal 0: missed)" in text


def test_a_recording_with_any_difference_does_not_count():
    same = {"allocations": 9, **dict.fromkeys(("allocated_error", "reserved_error"), 0)}
    same |= dict.fromkeys(("first_difference", "first_misplaced"))
    recordings = [same, {**same, "first_misplaced": 4}, {"error": "it did not begin with an empty allocator"}]
    measured = {str(number): outcome(1, 1, recording) for number, recording in enumerate(recordings)}
    found = planner_report.summed_up([], measured)
    assert found["recordings"] == {"compared": 3, "without_difference": 1}
    text = planner_report.report([], found, measured)
    assert "recording of 2: not replayed: it did not begin with an empty allocator" in text


# ------------------------------------------------------------------------------------------------------- recordings


def test_a_recording_is_the_same_after_it_was_written(tmp_path):
    chance, plain, live = random.Random(3), PlainAllocator(expandable=False, capacity=None), []
    for _ in range(200):
        if live and chance.random() < 0.4:
            plain.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(plain.malloc(int(2 ** chance.uniform(1, 26)), stream=chance.choice([0, 7])))
    snapshot = plain.snapshot()
    for entry in snapshot["device_traces"][0]:
        entry["frames"] = [{"name": "forward", "filename": "/somewhere/of/mine.py", "line": 3}]
    recorded_run.write_recording(snapshot, tmp_path / "a.json.gz")
    recorded_run.write_recording(snapshot, tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    recording = recorded_run.read_recording(tmp_path / "a.json.gz")
    assert "mine.py" not in json.dumps(recording)
    found = planner_runs.compare_recording(recording)
    assert found["peak_reserved"] == plain.peak_reserved
    assert found == planner_runs.compare_recording(snapshot)
    errors = (found["allocated_error"], found["reserved_error"], found["first_difference"], found["first_misplaced"])
    assert errors == (0, 0, None, None)


def test_requests_that_were_not_predicted_are_named_with_the_largest_first():
    found = planner_runs.other_requests({"512": 5, "4096": 3, "8192": 1}, {"512": 5, "4096": 1, "100000": 2})
    assert found == [
        {"bytes": 100_000, "recorded": 0, "predicted": 2},
        {"bytes": 4096, "recorded": 3, "predicted": 1},
        {"bytes": 8192, "recorded": 1, "predicted": 0},
    ]
    assert len(planner_runs.other_requests({"512": 5, "4096": 3}, {}, most=1)) == 1
