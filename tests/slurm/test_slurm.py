"""``launch/slurm.sbatch`` and ``srun`` on a real cluster of two nodes, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import Cluster, missing
from helpers import LONG
from helpers.resumed import assert_same_weights, losses
from helpers.started import own_recipe

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
STEPS = 40
SETTINGS = """
    model=Disturbed("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32, dropout=0.1, at=10, cut=10),
    optim=Optim("sgd", lr=0.1, momentum=0.9, clip_norm=1.0),
    batch_size=50,
    max_steps=40,
    memory=Memory(micro_batch_size=5, precision="64-true"),
    checkpoint=Checkpoint(every=100),
    run=Run(accelerator="cpu", predict=False, evaluate=False),
"""


def fit(recipe_file: Path, run_dir: Path, *flags: str) -> list[str]:
    """The command of a run."""
    return [sys.executable, "-m", "trainer", "fit", str(recipe_file), "--run.dir", str(run_dir), *flags]


def marked(folder: Path) -> tuple[str, ...]:
    """Flags of a run that is slow from its tenth step on, and says so."""
    return "--model.marks", str(folder / "marks"), "--model.seconds", "0.05"


@dataclass
class Job:
    """A job of ``launch/slurm.sbatch`` in ``folder``, and what it leaves."""

    cluster: Cluster
    number: str
    folder: Path

    @property
    def text(self) -> str:
        """What it has printed so far."""
        output = self.folder / "job.out"
        return output.read_text() if output.exists() else ""

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "own" / f"slurm-{self.number}"

    def logs(self, start: int = 0) -> Path:
        """The folder of the logs of a start."""
        return self.run_dir / "logs" / f"{self.number}-{start}"

    def wait_for_step(self) -> list[int]:
        """Until both ranks are in their tenth step; their pids."""
        files = [self.folder / "marks" / rank for rank in ("0", "1")]
        self._wait(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def wait_for_restart(self) -> None:
        """Until it is in the queue again, and has left its nodes; it need not wait two minutes there, as is usual."""
        self._wait(lambda: self.cluster.fields(self.number)["Restarts"] == "1")
        self._wait(self.cluster.idle)
        time.sleep(2)  # a node takes a job that begins in the second in which it was ended for the ended one
        self.cluster.command("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def complete(self) -> None:
        """Until it has ended well."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "PREEMPTED", "REQUEUED")
        self._wait(lambda: self.cluster.state(self.number) not in running)
        assert self.cluster.state(self.number) == "COMPLETED", self.text

    def _wait(self, condition) -> None:
        until = time.monotonic() + LONG
        while not condition():
            state = self.cluster.state(self.number)
            logs = {path.name: path.read_text()[-2000:] for path in self.folder.rglob("*.log")}
            assert time.monotonic() < until, f"{state}, {self.cluster.command('squeue')}\n{self.text}\n{logs}"
            assert state != "FAILED" or condition(), f"{self.text}\n{logs}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two nodes; skips where none can be started, with the reason."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster() as running:
        running.variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        running.variables["PYTHON"] = sys.executable
        yield running


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    return own_recipe(tmp_path_factory.mktemp("recipe"), SETTINGS)


@pytest.fixture
def submit(cluster, tmp_path):
    """A function that submits ``launch/slurm.sbatch`` with flags of sbatch and of the recipe, in ``tmp_path``."""

    def submitted(*options: str, flags: tuple[str, ...] = (), recipe: str | None = None) -> Job:
        recipe_file = own_recipe(tmp_path, SETTINGS)
        (tmp_path / "marks").mkdir()
        if recipe is not None:
            recipe_file.write_text(recipe)
        words = ["sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={tmp_path / 'job.out'}", *options]
        words += [str(ROOT / "launch" / "slurm.sbatch"), str(recipe_file), *flags]
        return Job(cluster, cluster.command(*words).strip(), tmp_path)

    return submitted


@pytest.fixture(scope="module")
def alone(cluster, recipe_file, tmp_path_factory):
    """The run directory of a single process without Slurm."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    cluster.command(*fit(recipe_file, run_dir))
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(cluster, recipe_file, tmp_path_factory):
    """The run directory of two ranks on two nodes, started by srun."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    cluster.command("srun", *TWO_NODES, *fit(recipe_file, run_dir))
    return run_dir


def test_a_job_on_two_nodes_gives_the_weights_of_one_process(submit, alone):
    job = submit(*TWO_NODES)
    job.complete()
    assert f"job {job.number} has finished: runs/own/slurm-{job.number}" in job.text
    assert json.loads((job.run_dir / "summary.json").read_text())["world_size"] == 2
    assert_same_weights(job.run_dir, alone, 1e-6)
    names = ["rank-00000-n1.log", "rank-00001-n2.log", "srun.log"]
    assert sorted(path.name for path in job.logs().iterdir()) == names
    assert f"step {STEPS}/{STEPS}" in (job.logs() / names[0]).read_text()


def test_srun_by_itself_starts_the_tasks_of_one_node(cluster, recipe_file, undisturbed, alone, tmp_path):
    # A name of which Fabric would make single runs.
    cluster.command("srun", "--ntasks=2", "--job-name=bash", *fit(recipe_file, tmp_path / "run"))
    assert len(losses(undisturbed)) == STEPS
    assert losses(tmp_path / "run") == losses(undisturbed)
    assert_same_weights(tmp_path / "run", alone, 1e-6)


def test_the_signal_before_the_time_limit_requeues_the_job_which_goes_on_in_mid_epoch(
    submit, cluster, undisturbed, tmp_path
):
    job = submit(*TWO_NODES, flags=marked(tmp_path))
    job.wait_for_step()
    cluster.command("scancel", "--signal=USR1", job.number)  # as --signal=USR1@120 does
    job.wait_for_restart()
    job.complete()
    assert "was asked to stop, and has saved a checkpoint: back into the queue" in job.text
    assert f"start 2, on n[1-2]: runs/own/slurm-{job.number}/logs/{job.number}-1" in job.text
    first, second = ((job.logs(start) / "rank-00000-n1.log").read_text() for start in (0, 1))
    assert "SIGUSR1 received: saving a checkpoint" in first
    assert "step 1/40" in first
    assert "step 1/40" not in second
    assert losses(job.run_dir) == losses(undisturbed)
    assert_same_weights(job.run_dir, undisturbed, 0.0)


def test_a_job_that_is_preempted_goes_on_when_the_other_has_ended(submit, cluster, undisturbed, tmp_path):
    job = submit(*TWO_NODES, "--exclusive", flags=marked(tmp_path))
    job.wait_for_step()
    other = ("--partition=high", "--nodes=2", "--exclusive", f"--output={tmp_path}/other", "--wrap=sleep 1")
    number = cluster.command("sbatch", "--parsable", *other).strip()
    job.wait_for_restart()
    job.complete()
    assert cluster.state(number) == "COMPLETED"
    assert "SIGTERM received" in (job.logs() / "rank-00000-n1.log").read_text()
    assert losses(job.run_dir) == losses(undisturbed)
    assert_same_weights(job.run_dir, undisturbed, 0.0)


def test_a_killed_task_ends_the_job_with_its_name_and_a_second_run_is_refused(submit, cluster, recipe_file, tmp_path):
    run_dir = tmp_path / "shared"
    job = submit(*TWO_NODES, flags=("--run.dir", str(run_dir), "--max_steps", "5000", *marked(tmp_path)))
    pids = job.wait_for_step()
    again = ["srun", "-n1", *fit(recipe_file, run_dir, "--run.resume", "auto")]
    second = subprocess.run(again, capture_output=True, text=True, env=cluster.environment, timeout=LONG)
    assert second.returncode == 2
    assert f"run.dir={run_dir} is in use by the run of pid {pids[0]} on n1" in second.stderr
    os.kill(pids[1], signal.SIGKILL)
    cluster.wait_until(lambda: cluster.ended(job.number) == ("FAILED", "137:0", "0"), LONG)
    assert "srun: error: n2: task 1: Killed" in job.text
    assert f"rank 0 on n1: trainer: error: rank 1 (pid {pids[1]} on n2) was killed or crashed" in job.text
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


NOT_ON_THE_SECOND = """
import os, time
from pathlib import Path

if os.environ["SLURM_PROCID"] == "1":
    while not Path("first").exists():
        time.sleep(0.1)
    raise SystemExit("this node lacks something")
Path("first").touch()
time.sleep(60)
"""


def test_a_rank_that_fails_before_training_is_not_taken_for_one_that_was_asked_to_stop(submit, cluster):
    job = submit(*TWO_NODES, recipe=NOT_ON_THE_SECOND)  # the first is sent SIGTERM then, and leaves with 75
    cluster.wait_until(lambda: cluster.ended(job.number) == ("FAILED", "75:0", "0"), LONG)
    assert "srun: error: n2: task 1: Exited with exit code 2" in job.text
    assert "srun: error: n1: task 0: Exited with exit code 75" in job.text


def test_each_task_of_an_array_has_its_own_directory(submit, cluster, alone):
    job = submit("--array=1-2", "--ntasks=1")
    numbers = cluster.command("squeue", "--noheader", "--array", "--format=%A").split()
    folders = [job.run_dir.with_name(f"slurm-{job.number}_{task}") for task in (1, 2)]
    cluster.wait_until(lambda: all((folder / "summary.json").exists() for folder in folders), LONG)
    cluster.wait_until(lambda: {cluster.state(number) for number in numbers} == {"COMPLETED"}, LONG)
    assert len(numbers) == 2
    for folder in folders:
        assert_same_weights(folder, alone, 0.0)


def test_a_cancelled_job_saves_and_is_not_put_back(submit, cluster, tmp_path):
    job = submit(*TWO_NODES, flags=("--max_steps", "5000", *marked(tmp_path)))
    job.wait_for_step()
    cluster.command("scancel", job.number)
    cluster.wait_until(lambda: cluster.state(job.number) == "CANCELLED" and not cluster.running(job.number), LONG)
    time.sleep(1)
    state, _, restarts = cluster.ended(job.number)
    assert (state, restarts) == ("CANCELLED", "0")
    assert json.loads((job.run_dir / "summary.json").read_text())["status"] == "stopped"
    assert list((job.run_dir / "checkpoints").glob("step-*"))
