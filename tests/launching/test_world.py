"""What the launcher's environment says."""

from __future__ import annotations

import pytest
import torch

from trainer import Memory, Recipe, RecipeError, Run
from trainer.data import Digits
from trainer.launching.start import host_threads
from trainer.launching.world import World, detect_world, resolve_world
from trainer.memory.eager_update import EagerOptimizerUpdate
from trainer.memory.plan import decide_plan
from trainer.models import MLP

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
NODES = TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "8"}
FABRIC_RUN = TORCHRUN | {"LT_CLI_USED": "1", "LT_DEVICES": "2", "LT_NUM_NODES": "1"}
ACCELERATE = {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_MIXED_PRECISION": "no"}
SEVERAL = ACCELERATE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}
SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}
SLURM |= {"SLURM_STEP_NODELIST": "n[1-2]"} | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
NO_GPU = "no NVIDIA GPU found|this torch is built without CUDA"
LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE")


def recipe(**run):
    return Recipe(model=MLP(), data=Digits(), batch_size=8, run=Run(**{"accelerator": "cpu"} | run))


@pytest.mark.parametrize(
    ("run", "environment", "world"),
    [
        ({}, {}, World("python", "cpu", 1)),
        ({"devices": 4}, {}, World("python", "cpu", 4)),
        ({}, NODES, World("torchrun", "cpu", 4, 2)),
        ({"devices": 4}, NODES, World("torchrun", "cpu", 4, 2)),
        ({}, SLURM, World("slurm", "cpu", 3, 2)),
        ({"devices": 2}, BATCH_SCRIPT, World("python", "cpu", 2)),
        *(({}, {name: "1"}, World("python", "cpu", 1)) for name in LAUNCHERS),
        # A process that Fabric started itself for --run.devices 2:
        ({"devices": 2}, {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, World("python", "cpu", 2)),
        ({}, ACCELERATE, World("accelerate launch", "cpu", 1)),
        ({}, ACCELERATE | TORCHRUN, World("accelerate launch (torchrun)", "cpu", 2)),
        ({"devices": 2}, SEVERAL, World("accelerate launch", "cpu", 2)),  # Fabric starts the other one
    ],
)
def test_the_launcher_says_how_many_there_are(run, environment, world):
    found = detect_world(recipe(**run), environment)
    assert found == world
    assert found.world_size == world.devices * world.nodes
    assert found.fallback is None  # the accelerator is as it was asked for


CONTRADICTIONS: dict[str, tuple[dict, dict]] = {
    "devices of Slurm": ({"devices": 6}, SLURM),
    "no srun": ({}, BATCH_SCRIPT),
    "devices of torchrun": ({"devices": 2}, NODES),
    **{name: ({}, {name: "2", "RANK": "1"}) for name in LAUNCHERS},
    "ranks of torchrun": ({}, NODES | {"WORLD_SIZE": "5"}),
    "accelerate started one": ({}, SEVERAL),
    "precision of accelerate": ({}, ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    "FSDP of accelerate": ({}, ACCELERATE | {"ACCELERATE_USE_FSDP": "true"}),
    "strategy of Fabric": ({}, FABRIC_RUN | {"LT_STRATEGY": "deepspeed"}),
    "devices of Fabric": ({}, FABRIC_RUN | {"LT_DEVICES": "3"}),
    "nodes of Fabric": ({}, FABRIC_RUN | {"LT_NUM_NODES": "2"}),
    "variables of Fabric alone": ({}, {"LT_CLI_USED": "1", "LT_DEVICES": "2"}),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(case, golden):
    run, environment = CONTRADICTIONS[case]
    with golden.raises(RecipeError):
        resolve_world(recipe(**run), dict(environment))


def test_the_options_of_fabric_run_are_taken_over_and_its_variables_removed():
    environment = FABRIC_RUN | {"OTHER": "kept", "LT_ACCELERATOR": "cpu", "LT_STRATEGY": "ddp", "LT_PRECISION": "bf16"}
    adopted, world = resolve_world(recipe(), environment)
    assert environment == TORCHRUN | {"OTHER": "kept"}
    assert (adopted.run.accelerator, adopted.memory.strategy, adopted.memory.precision) == ("cpu", "ddp", "bf16-mixed")
    assert world == World("fabric run", "cpu", 2)
    own = recipe()
    assert resolve_world(own, {}) == (own, World("python", "cpu", 1))


def test_the_line_says_what_was_found():
    world = World("torchrun", "cuda", 4, 2, backend="nccl")
    assert world.describe("fsdp") == "torchrun: 8 ranks on 2 nodes (4 per node), cuda, nccl, fsdp"
    alone = World("python", "cpu", 1, fallback="no NVIDIA GPU found")
    said = "python: 1 rank on 1 node, cpu (no NVIDIA GPU found), no process group, single"
    assert alone.describe("single") == said


def test_all_gpus_are_used_and_no_more_ranks_than_there_are(monkeypatch, golden):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted = recipe(accelerator="auto")
    assert resolve_world(wanted, {})[1].fallback in ("no NVIDIA GPU found", "this torch is built without CUDA")
    with golden.raises(RecipeError, "none", hide=[NO_GPU]):
        detect_world(recipe(accelerator="cuda"), {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_world(wanted, {})[1] == World("python", "cuda", 2)
    with golden.raises(RecipeError, "asked for"):
        resolve_world(recipe(accelerator="auto", devices=3), {})
    four = TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}
    with golden.raises(RecipeError, "started"):
        resolve_world(wanted, four)


@pytest.mark.parametrize(
    ("environment", "accelerator", "devices", "offload", "threads"),
    [
        ({"OMP_NUM_THREADS": "1"}, "cuda", 2, "optimizer", 7),
        ({"OMP_NUM_THREADS": "1"}, "cuda", 4, "parameters", 3),
        ({"OMP_NUM_THREADS": "1"}, "cuda", 16, "optimizer", 1),
        ({"OMP_NUM_THREADS": "4"}, "cuda", 2, "optimizer", None),  # the user's
        ({"OMP_NUM_THREADS": "1"}, "cuda", 1, "optimizer", None),  # torchrun sets it for several ranks only
        ({"OMP_NUM_THREADS": "1"}, "cpu", 2, "optimizer", None),  # the cores compute
        ({"OMP_NUM_THREADS": "1"}, "cuda", 2, "none", None),
    ],
)
def test_offloaded_weights_are_updated_by_the_cores_that_torchrun_leaves_idle(
    environment, accelerator, devices, offload, threads, monkeypatch
):
    monkeypatch.setattr("trainer.launching.start.cores", lambda: 16)
    recipe = Recipe(model=MLP(), data=Digits(), batch_size=8 * devices, memory=Memory(cpu_offload=offload))
    world, plan = World("torchrun", accelerator, devices), decide_plan(recipe, devices)
    assert host_threads(world, plan, TORCHRUN | environment) == threads
    assert host_threads(world, plan, environment) is None


def test_the_thread_that_updates_ahead_has_as_many_threads():
    before = torch.get_num_threads()
    ahead = EagerOptimizerUpdate(torch.optim.SGD([torch.zeros(1)]))
    try:
        torch.set_num_threads(3)
        assert ahead.thread.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
        ahead.thread.shutdown()
