"""What the launcher's environment says."""

from __future__ import annotations

import pytest
import torch

from trainer import Memory, Recipe, RecipeError, Run
from trainer.data import Digits
from trainer.launching.world import World, detect_world, find_world
from trainer.models import MLP


def recipe(**run):
    return Recipe(model=MLP(), data=Digits(), batch_size=8, run=Run(accelerator="cpu", **run))


def test_plain_python_has_one_process_unless_told_otherwise():
    assert detect_world(recipe(), {}) == World("python", "cpu", 1)
    assert detect_world(recipe(devices=4), {}).size == 4


def test_torchrun_and_slurm_say_how_many_there_are():
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}
    assert detect_world(recipe(), torchrun) == World("torchrun", "cpu", 4, 2)
    assert detect_world(recipe(devices=4), torchrun).size == 8
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}
    step |= {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}
    slurm = step | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    assert detect_world(recipe(), slurm) == World("slurm", "cpu", 3, 2)
    with pytest.raises(RecipeError, match=r"run\.devices=6 contradicts the launcher: slurm started 3"):
        detect_world(recipe(devices=6), slurm)
    in_a_batch_script = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}
    with pytest.raises(RecipeError, match="srun did not start this process"):
        detect_world(recipe(), in_a_batch_script)
    assert detect_world(recipe(devices=2), in_a_batch_script) == World("python", "cpu", 2)
    with pytest.raises(RecipeError, match=r"run\.devices=2 contradicts the launcher: torchrun started 4"):
        detect_world(recipe(devices=2), torchrun)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE"])
def test_a_launcher_that_is_not_known_does_not_make_silent_single_runs(name):
    with pytest.raises(RecipeError, match=f"{name}=2 in the environment .* neither torchrun nor Slurm"):
        detect_world(recipe(), {name: "2", "RANK": "1"})
    assert detect_world(recipe(), {name: "1"}).size == 1
    # A process that Fabric started itself for --run.devices 2:
    if name == "WORLD_SIZE":
        assert detect_world(recipe(devices=2), {name: "2", "LOCAL_RANK": "1"}).size == 2


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
FABRIC_RUN = TORCHRUN | {"LT_CLI_USED": "1", "LT_DEVICES": "2", "LT_NUM_NODES": "1"}


def test_the_options_of_fabric_run_are_taken_over_and_its_variables_removed():
    environment = FABRIC_RUN | {"OTHER": "kept", "LT_ACCELERATOR": "cpu", "LT_STRATEGY": "ddp", "LT_PRECISION": "bf16"}
    adopted, world = find_world(recipe(), environment)
    assert environment == TORCHRUN | {"OTHER": "kept"}
    assert (adopted.run.accelerator, adopted.memory.strategy, adopted.memory.precision) == ("cpu", "ddp", "bf16-mixed")
    assert world == World("fabric run", "cpu", 2)
    own = recipe()
    assert find_world(own, {}) == (own, World("python", "cpu", 1))
    with pytest.raises(RecipeError, match=r"memory\.strategy='deepspeed' is not one of"):
        find_world(recipe(), FABRIC_RUN | {"LT_STRATEGY": "deepspeed"})


def test_variables_of_another_fabric_run_are_refused():
    with pytest.raises(RecipeError, match=r"LT_DEVICES=3 asks for another world .* whose devices is 2: .* --devices 3"):
        find_world(recipe(), FABRIC_RUN | {"LT_DEVICES": "3"})
    with pytest.raises(RecipeError, match=r"LT_NUM_NODES=2 .* whose num_nodes is 1: .* --num-nodes 2"):
        find_world(recipe(), FABRIC_RUN | {"LT_NUM_NODES": "2"})
    with pytest.raises(RecipeError, match="unset LT_CLI_USED"):
        find_world(recipe(), {"LT_CLI_USED": "1", "LT_DEVICES": "2"})


def test_nodes_with_different_numbers_of_ranks_are_refused():
    with pytest.raises(RecipeError, match=r"torchrun started 3 ranks on 2 node\(s\), 2 of them on this one"):
        detect_world(recipe(), TORCHRUN | {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "3"})


ACCELERATE = {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_MIXED_PRECISION": "no"}


def test_accelerate_launch_is_known_with_one_process_and_with_torchruns():
    assert detect_world(recipe(), ACCELERATE) == World("accelerate launch", "cpu", 1)
    assert detect_world(recipe(), ACCELERATE | TORCHRUN) == World("accelerate launch (torchrun)", "cpu", 2)
    several = ACCELERATE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(RecipeError, match="asked for several processes and started one: start them with torchrun"):
        detect_world(recipe(), several)
    assert detect_world(recipe(devices=2), several).size == 2  # Fabric starts the other one


def test_options_of_accelerate_launch_are_not_dropped():
    with pytest.raises(RecipeError, match=r"--mixed_precision bf16 contradicts memory\.precision=32-true"):
        detect_world(recipe(), ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "bf16"})
    with pytest.raises(RecipeError, match=r"--use_fsdp is not for this trainer: .* --memory\.strategy fsdp"):
        detect_world(recipe(), ACCELERATE | {"ACCELERATE_USE_FSDP": "true"})


def test_the_line_says_what_was_found():
    world = World("torchrun", "cuda", 4, 2, backend="nccl")
    assert world.describe("fsdp") == "torchrun: 8 ranks on 2 nodes (4 a node), cuda, nccl, fsdp"
    alone = World("python", "cpu", 1, fallback="torch sees no CUDA device")
    assert alone.describe("single") == (
        "python: 1 rank on 1 node, cpu (torch sees no CUDA device), no process group, single"
    )


def on_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    return Recipe(model=MLP(), data=Digits(), batch_size=8)


def test_a_machine_without_a_gpu_is_said_to_be_one_and_all_gpus_are_used(monkeypatch):
    wanted = on_gpus(monkeypatch, 0)
    assert find_world(wanted, {})[1].fallback in ("torch sees no CUDA device", "this torch is built without CUDA")
    assert detect_world(recipe(), {}).fallback is None  # as it was asked for
    assert find_world(on_gpus(monkeypatch, 4), {})[1] == World("python", "cuda", 4)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    wanted = on_gpus(monkeypatch, 2)
    with pytest.raises(RecipeError, match=r"run\.devices asks for 3 ranks on this node, and torch sees 2 GPU\(s\)"):
        find_world(wanted.replace(run=Run(devices=3)), {})
    with pytest.raises(RecipeError, match=r"torchrun started 4 ranks on this node, and torch sees 2 GPU\(s\)"):
        find_world(wanted, TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"})


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted = Recipe(model=MLP(), data=Digits(), batch_size=8, run=Run(accelerator="cuda"), memory=Memory())
    with pytest.raises(RecipeError, match=r"run\.accelerator=cuda, but torch sees no CUDA device"):
        detect_world(wanted, {})
