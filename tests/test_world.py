"""What the launcher's environment says."""

from __future__ import annotations

import pytest

from trainer import Memory, Recipe, RecipeError, Run
from trainer.data import Digits
from trainer.models import MLP
from trainer.world import World, adopt_fabric_run, detect_world


def recipe(**run):
    return Recipe(model=MLP(), data=Digits(), batch_size=8, run=Run(accelerator="cpu", **run))


def test_plain_python_has_one_process_unless_told_otherwise():
    assert detect_world(recipe(), {}) == World("plain", "cpu", 1)
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
    assert detect_world(recipe(devices=2), in_a_batch_script) == World("plain", "cpu", 2)
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


def test_the_options_of_fabric_run_are_taken_over_and_its_variables_removed():
    environment = {"LT_CLI_USED": "1", "LT_DEVICES": "2", "LT_NUM_NODES": "1", "OTHER": "kept"}
    environment |= {"LT_ACCELERATOR": "gpu", "LT_STRATEGY": "ddp", "LT_PRECISION": "bf16"}
    adopted = adopt_fabric_run(recipe(), environment)
    assert environment == {"OTHER": "kept"}
    assert (adopted.run.accelerator, adopted.memory.strategy, adopted.memory.precision) == ("cuda", "ddp", "bf16-mixed")
    own = recipe()
    assert adopt_fabric_run(own, {}) is own
    with pytest.raises(RecipeError, match=r"memory\.strategy='deepspeed' is not one of"):
        adopt_fabric_run(recipe(), {"LT_CLI_USED": "1", "LT_STRATEGY": "deepspeed"})


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted = Recipe(model=MLP(), data=Digits(), batch_size=8, run=Run(accelerator="cuda"), memory=Memory())
    with pytest.raises(RecipeError, match=r"run\.accelerator=cuda, but torch sees no CUDA device"):
        detect_world(wanted, {})
