"""A cluster for all Slurm tests, and the same recipe for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, missing
from helpers import LONG
from helpers.started import own_recipe
from slurm_jobs import SETTINGS, Job

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster():
    """A cluster of two nodes; skips where none can be started, which is said."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster() as running:
        running.variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        running.variables["PYTHON"] = sys.executable
        yield running


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory):
    return own_recipe(tmp_path_factory.mktemp("recipe"), SETTINGS)


@pytest.fixture
def submit(cluster, tmp_path):
    """A function that submits ``launch/slurm.sbatch`` with flags of sbatch and of the recipe, in ``tmp_path``."""

    def submitted(*options: str, flags: tuple[str, ...] = (), recipe: str | None = None) -> Job:
        output, marks, recipe_file = tmp_path / "job.out", tmp_path / "marks", own_recipe(tmp_path, SETTINGS)
        marks.mkdir()
        if recipe is not None:
            recipe_file.write_text(recipe)
        words = ["sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={output}", *options]
        words += [str(ROOT / "launch" / "slurm.sbatch"), str(recipe_file), *flags]
        return Job(cluster, cluster.command(*words).strip(), output, marks)

    return submitted


@pytest.fixture(scope="session")
def alone(cluster, recipe_file, tmp_path_factory):
    """The run directory of a single process without Slurm."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    command = [sys.executable, "-m", "trainer", "fit", str(recipe_file), "--run.dir", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, env=cluster.environment, timeout=LONG)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture(scope="session")
def undisturbed(cluster, recipe_file, tmp_path_factory):
    """The run directory of two ranks on two nodes, started by srun."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    fit = [sys.executable, "-m", "trainer", "fit", str(recipe_file), "--run.dir", str(run_dir)]
    cluster.command("srun", "--nodes=2", "--ntasks-per-node=1", *fit)
    return run_dir
