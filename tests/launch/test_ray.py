"""A recipe on the workers of Ray Train: the same result as alone, killed workers, errors."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LONG
from helpers.resumed import assert_same_weights, losses
from helpers.started import FOREIGN, own_recipe

from trainer import Recipe, RecipeError, Run
from trainer.data import Digits
from trainer.launching.world import World, detect_world
from trainer.models import MLP

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "ray_train.py"
WORKER = {"RAY_JOB_ID": "01000000", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
WORKER |= {"NODE_RANK": "1"}

SETTINGS = """
    model=Disturbed("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32, dropout=0.1, at=5, cut=10),
    optim=Optim("sgd", lr=0.1, momentum=0.9, clip_norm=1.0),
    batch_size=50,
    max_steps=8,
    memory=Memory(micro_batch_size=5, precision="64-true"),
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("ray_train", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path):
    own_recipe(tmp_path, SETTINGS)
    return tmp_path


def start(folder, *command):
    clean = {key: value for key, value in os.environ.items() if not key.startswith((*FOREIGN, "RAY_"))}
    # Ray leaves a key and the records of its runs in the home directory.
    clean |= {"OMP_NUM_THREADS": "1", "HOME": str(folder), "NO_COLOR": "1"}
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), clean.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=LONG, env=clean
    )


def on_ray(folder, *flags):
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    own = ["--run.dir", "run", "--model.rank", "1", "--model.done", str(folder / "done")]
    return start(folder, str(SCRIPT), "own.py", "--workers", "2", *own, *flags)


def test_a_killed_worker_is_started_again_and_nothing_is_lost(folder):
    done = on_ray(folder, "--model.what", "kill", "--checkpoint.every", "2", "--max-failures", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "done").exists()
    assert "starting from step 0" in done.stdout + done.stderr
    assert "resuming" in done.stdout + done.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["steps"]) == ("finished", 2, 8)
    for name, flags in {"alone": [], "two": ["--run.devices", "2"]}.items():
        undisturbed = start(folder, "own.py", "--run.dir", name, *flags)
        assert undisturbed.returncode == 0, undisturbed.stderr
    assert losses(folder / "run") == losses(folder / "two")  # to the last digit, dropout included
    assert_same_weights(folder / "run", folder / "alone", 1e-6, 1e-9)


def test_an_error_in_a_recipe_is_the_last_thing_that_is_said(folder):
    done = on_ray(folder, "--model.what", "raise", "--max-failures", "0")
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("[rank 1] trainer: error: rank 1, step 5, forward, samples "), done.stderr
    assert last.endswith(": ZeroDivisionError: division by zero")


def test_a_setting_that_cannot_work_is_refused_once(folder):
    done = on_ray(folder, "--optim.lr", "fast")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("trainer: error: optim.lr")
    assert done.stderr.count("Started training worker group") + done.stdout.count("Started training worker group") == 1


def test_more_workers_than_a_local_ray_has_room_for_are_refused(script, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    each, here = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 2.0}
    assert script.missing_resources(here, each, 2) is None
    missing = script.missing_resources(here, each, 3)
    assert "--workers 3 with 1 GPU each need 3 GPU, and this Ray has 2" in missing
    monkeypatch.setenv("RAY_ADDRESS", "ray-head:6379")  # a cluster that may grow
    assert script.missing_resources({"CPU": 4.0}, each, 3) is None


def test_runs_are_resumed_unless_told_otherwise(script):
    options, words = script.parse(["own.py", "--workers", "2", "--optim.lr", "0.1"])
    assert (options.workers, words) == (2, ["own.py", "--optim.lr", "0.1", "--run.resume", "auto"])
    assert script.parse(["own.py", "--run.resume=none", "--workers", "2"])[1] == ["own.py", "--run.resume=none"]


def test_a_script_without_ray_says_how_to_get_it(folder):
    (folder / "ray.py").write_text("raise ImportError('no such package')")
    code = "import runpy, sys; sys.argv = ['x', 'own.py', '--workers', '2']; "
    done = start(folder, "-c", f"{code}runpy.run_path({str(SCRIPT)!r}, run_name='__main__')")
    assert done.returncode == 2
    assert "launch/ray_train.py needs Ray (no such package): pip install 'exactbatch-trainer[ray]'" in done.stderr


def test_workers_of_ray_are_ranks():
    recipe = Recipe(model=MLP(), data=Digits(), batch_size=8, run=Run(accelerator="cpu"))
    assert detect_world(recipe, WORKER) == World("ray", "cpu", 2, 2)
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    assert detect_world(recipe, WORKER | torchrun).launcher == "torchrun"
    with pytest.raises(RecipeError, match="Ray has put 3 of 4 workers on this node"):
        detect_world(recipe, WORKER | {"LOCAL_WORLD_SIZE": "3"})
