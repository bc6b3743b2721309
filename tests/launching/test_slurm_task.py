"""What srun's variables say, and what is refused of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from helpers import LONG

from trainer.errors import EXIT_REQUEUE, RecipeError
from trainer.launching.slurm import devices_per_node, require_srun, slurm_task
from trainer.launching.start import _environment
from trainer.launching.world import World

NUMBERS = {"JOB_ID": 17, "STEP_ID": 2, "PROCID": 3, "LOCALID": 1, "NODEID": 1, "STEP_NUM_TASKS": 4}
STEP = {f"SLURM_{name}": str(number) for name, number in NUMBERS.items()}
STEP |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]"}


def task(**changed):
    found = slurm_task(STEP | changed)
    assert found is not None
    return found


def test_a_task_knows_its_place_and_one_by_itself_is_none():
    found = task()
    assert (found.rank, found.local_rank, found.node_rank, found.size) == (3, 1, 1, 4)
    assert found.tasks_per_node == (2, 2)
    assert found.torchrun_env == {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4"}
    assert devices_per_node(found, None) == devices_per_node(found, 2) == 2
    assert slurm_task({}) is None
    assert slurm_task(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert slurm_task({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4"}) is None  # in a batch script


def test_steps_and_jobs_have_ports_of_their_own():
    ports = [task(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)).port for job in range(990, 1010) for step in range(9)]
    assert len(set(ports)) == len(ports)
    assert 15000 <= min(ports) <= max(ports) < 25000
    assert task(SLURM_JOB_ID="123456789").port < 25000


@pytest.mark.parametrize("wish", [None, "1234"])
def test_tasks_of_one_node_meet_at_the_port_of_their_step(monkeypatch, wish):
    for name, text in (STEP | {"MASTER_PORT": wish}).items():
        monkeypatch.delenv(name, raising=False) if text is None else monkeypatch.setenv(name, text)
    (told,) = _environment(World("slurm", "cpu", 4))
    assert (told.global_rank(), told.local_rank(), told.node_rank(), told.world_size()) == (3, 1, 1, 4)
    assert told.main_address == "n1"
    assert os.environ["MASTER_PORT"] == str(told.main_port) == (wish or str(task().port))


@pytest.mark.parametrize(
    ("changed", "gpus"),
    [({"SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"}, None), ({"SLURM_NODEID": "0"}, None), ({}, 1)],
    ids=["uneven", "cyclic", "few GPUs"],
)
def test_what_cannot_work_is_refused_with_the_fix(changed, gpus, golden):
    with golden.raises(RecipeError):
        devices_per_node(task(**changed), gpus)


def test_a_job_of_several_tasks_without_srun_is_refused(golden):
    with golden.raises(RecipeError):
        require_srun({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4"})
    for fine in ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "4"}, STEP | {"SLURM_NTASKS": "4"}):
        require_srun(fine)


@pytest.mark.parametrize(("variables", "code"), [({"SLURM_JOB_ID": "17"}, EXIT_REQUEUE), ({}, -signal.SIGTERM)])
def test_a_task_that_is_asked_to_stop_before_training_can_be_requeued(variables, code):
    wait = "from trainer.faults.signals import requeue_before_training as leave; leave(); print('ready', flush=True)"
    command = [sys.executable, "-c", f"{wait}; import time; time.sleep(600)"]
    environment = variables | {"PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, said = process.communicate(timeout=LONG)
    assert process.returncode == code
    assert ("SIGTERM received before training" in said) == bool(variables)
