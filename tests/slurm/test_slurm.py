"""``launch/slurm.sbatch`` and ``srun`` on a real cluster of two nodes, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import LONG
from helpers.resumed import assert_same_weights, losses

pytestmark = pytest.mark.slurm

TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
STEPS = 40


def marked(folder: Path) -> tuple[str, ...]:
    """Flags of a run that is slow from its tenth step on, and says so."""
    return "--model.marks", str(folder / "marks"), "--model.seconds", "0.05"


def test_a_job_on_two_nodes_gives_the_weights_of_one_process(submit, alone, tmp_path):
    job = submit(*TWO_NODES)
    assert job.wait() == "COMPLETED", job.text
    run_dir = tmp_path / "runs" / "own" / f"slurm-{job.number}"
    assert f"job {job.number} has finished: runs/own/slurm-{job.number}" in job.text
    assert json.loads((run_dir / "summary.json").read_text())["world_size"] == 2
    assert_same_weights(run_dir, alone, 1e-6)
    logs = run_dir / "logs" / f"{job.number}-0"
    assert sorted(path.name for path in logs.iterdir()) == ["rank-00000-n1.log", "rank-00001-n2.log", "srun.log"]
    assert f"step {STEPS}/{STEPS}" in (logs / "rank-00000-n1.log").read_text()


def test_srun_by_itself_starts_the_tasks_of_one_node(cluster, recipe_file, undisturbed, alone, tmp_path):
    fit = [sys.executable, "-m", "trainer", "fit", str(recipe_file), "--run.dir", str(tmp_path / "run")]
    cluster.command("srun", "--ntasks=2", "--job-name=bash", *fit)  # a name of which Fabric would make single runs
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
    assert job.wait() == "COMPLETED", job.text
    run_dir = tmp_path / "runs" / "own" / f"slurm-{job.number}"
    assert "was asked to stop, and has saved a checkpoint: back into the queue" in job.text
    assert f"start 2, on n[1-2]: runs/own/slurm-{job.number}/logs/{job.number}-1" in job.text
    first, second = ((run_dir / "logs" / f"{job.number}-{n}" / "rank-00000-n1.log").read_text() for n in (0, 1))
    assert "SIGUSR1 received: saving a checkpoint" in first
    assert "step 1/40" in first
    assert "step 1/40" not in second
    assert losses(run_dir) == losses(undisturbed)
    assert_same_weights(run_dir, undisturbed, 0.0)


def test_a_job_that_is_preempted_goes_on_when_the_other_has_ended(submit, cluster, undisturbed, tmp_path):
    job = submit(*TWO_NODES, "--exclusive", flags=marked(tmp_path))
    job.wait_for_step()
    other = ("--partition=high", "--nodes=2", "--exclusive", f"--output={tmp_path}/other", "--wrap=sleep 1")
    number = cluster.command("sbatch", "--parsable", *other).strip()
    job.wait_for_restart()
    assert job.wait() == "COMPLETED", job.text
    assert cluster.state(number) == "COMPLETED"
    run_dir = tmp_path / "runs" / "own" / f"slurm-{job.number}"
    assert "SIGTERM received" in (run_dir / "logs" / f"{job.number}-0" / "rank-00000-n1.log").read_text()
    assert losses(run_dir) == losses(undisturbed)
    assert_same_weights(run_dir, undisturbed, 0.0)


def test_a_killed_task_ends_the_job_with_its_name_and_a_second_run_is_refused(submit, cluster, recipe_file, tmp_path):
    run_dir = tmp_path / "shared"
    flags = ("--run.dir", str(run_dir), "--max_steps", "5000", *marked(tmp_path))
    job = submit(*TWO_NODES, flags=flags)
    pids = job.wait_for_step()
    fit = [sys.executable, "-m", "trainer", "fit", str(recipe_file), "--run.dir", str(run_dir), "--run.resume", "auto"]
    second = subprocess.run(
        ["srun", "-n1", *fit], capture_output=True, text=True, env=cluster.environment, timeout=LONG
    )
    assert second.returncode == 2
    assert f"run.dir={run_dir} is in use by the run of pid {pids[0]} on n1" in second.stderr
    os.kill(pids[1], signal.SIGKILL)
    cluster.wait_until(lambda: cluster.state(job.number) == "FAILED", LONG)
    assert cluster.exit_code(job.number) == "137:0"
    assert cluster.restarts(job.number) == 0
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
    cluster.wait_until(lambda: cluster.state(job.number) == "FAILED", LONG)
    assert (cluster.exit_code(job.number), cluster.restarts(job.number)) == ("75:0", 0)
    assert "srun: error: n2: task 1: Exited with exit code 2" in job.text
    assert "srun: error: n1: task 0: Exited with exit code 75" in job.text


def test_each_task_of_an_array_has_its_own_directory(submit, cluster, alone, tmp_path):
    job = submit("--array=1-2", "--ntasks=1")
    numbers = cluster.command("squeue", "--noheader", "--array", "--format=%A").split()
    folders = [tmp_path / "runs" / "own" / f"slurm-{job.number}_{task}" for task in (1, 2)]
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
    assert (cluster.state(job.number), cluster.restarts(job.number)) == ("CANCELLED", 0)
    run_dir = tmp_path / "runs" / "own" / f"slurm-{job.number}"
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "stopped"
    assert list((run_dir / "checkpoints").glob("step-*"))
