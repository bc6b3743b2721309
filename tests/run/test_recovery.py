"""A run that runs out of memory ends with the weights of one that does not."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.memory_hog import Hungry
from helpers.ranks import RankPool
from helpers.resumed import losses
from helpers.rounding import EPS, ROUNDING
from safetensors.torch import load_file

from trainer import Checkpoint, Memory, Optim, Recipe, Run
from trainer.api import fit
from trainer.data import Digits
from trainer.memory.oom import OutOfMemoryError

pytestmark = pytest.mark.usefixtures("no_pictures")

SHAPE = {"patch_size": 4, "layers": 2, "heads": 2, "width": 16, "mlp_width": 32}
OPTIM = Optim("adamw", lr=1e-3, weight_decay=0.1, eps=EPS, schedule="cosine", warmup_steps=2, clip_norm=1.0)


def run(hunger: dict, memory: dict, folder: Any = None, optim: Optim = OPTIM, **changes: Any) -> dict:
    """Train five steps of 24 samples, over an epoch's end, in float64; what came out is read on the first rank."""
    run_dir = Path(folder or tempfile.mkdtemp()) / "run"
    settings = {"dir": str(run_dir), "progress": False, "evaluate": False} | changes.pop("run", {})
    recipe = Recipe(
        model=Hungry("custom", **SHAPE, **hunger),
        data=Digits(test_fraction=0.97),  # 54 samples to train on
        optim=optim,
        batch_size=24,
        epochs=2,
        max_steps=5,
        memory=Memory(**{"micro_batch_size": 8, "precision": "64-true"} | memory),
        run=Run(**settings),
        **changes,
    )
    fit(recipe)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return {}
    weights, summary = load_file(run_dir / "model" / "model.safetensors"), read(run_dir, "summary")
    return {"weights": weights, "losses": losses(run_dir), "summary": summary, "status": read(run_dir, "status")}


def read(run_dir: Path, name: str) -> dict:
    return json.loads((run_dir / f"{name}.json").read_text())


def error(a: dict, b: dict) -> float:
    flat = [torch.cat([run["weights"][name].flatten() for name in b["weights"]]) for run in (a, b)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.fixture(scope="module")
def ranks():
    """Processes of their own: whatever other tests have left there might refer to the process group."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def undisturbed() -> dict:
    return run({}, {})


def require_recovered(disturbed: dict, undisturbed: dict, micro_batch_size: int, recoveries: int) -> None:
    assert error(disturbed, undisturbed) <= ROUNDING
    assert disturbed["losses"] == pytest.approx(undisturbed["losses"], rel=ROUNDING)  # five, each step once
    expected = {"micro_batch_size": micro_batch_size, "recoveries": recoveries, "steps": 5}
    assert expected.items() <= disturbed["summary"].items()
    assert disturbed["status"]["cut"] == {"batch_size": 24, "micro_batch_size": micro_batch_size}


@pytest.mark.parametrize(
    ("phase", "memory"),
    [
        ("forward", {}),
        ("backward", {"cpu_offload": "optimizer"}),
        pytest.param("forward", {"cpu_offload": "parameters"}, marks=pytest.mark.slow),
        ("backward", {"activation_checkpointing": "full"}),
    ],
    ids=str,
)
def test_one_rank_takes_the_step_again_in_smaller_micro_batches(phase, memory, undisturbed):
    require_recovered(run({"phase": phase, "most": 3, "after": 4}, memory), undisturbed, 2, 2)


SLOW = [("forward", {"strategy": "ddp"}), ("backward", {"strategy": "ddp"}), ("forward", {"strategy": "fsdp"})]
SLOW += [("forward", {"strategy": "ddp", "cpu_offload": "optimizer"})]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "memory"),
    [
        ("backward", {"strategy": "fsdp", "cpu_offload": "parameters"}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
    ids=str,
)
def test_all_ranks_take_the_step_again_when_one_had_no_memory(phase, memory, undisturbed, ranks, tmp_path):
    hunger = {"phase": phase, "rank": 1, "most": 3, "after": 4}
    require_recovered(ranks.run(run, hunger, memory, str(tmp_path))[0], undisturbed, 2, 2)


def test_a_resumed_run_keeps_to_the_smaller_micro_batches(tmp_path):
    hunger, options = {"most": 3, "after": 4}, {"folder": tmp_path, "checkpoint": Checkpoint(every=2)}
    run(hunger, {}, **options)
    again = run(hunger, {}, **options, run={"resume": "auto"})
    assert again["summary"]["micro_batch_size"] == 2  # which evaluations follow, too
    assert again["summary"]["recoveries"] == 0
    assert again["status"]["cut"] == {"batch_size": 24, "micro_batch_size": 2}
    assert (again["status"]["attempt"], again["status"]["status"]) == (2, "finished")


@pytest.mark.first(1)
@pytest.mark.parametrize("memory", [{}, {"strategy": "fsdp"}, {"cpu_offload": "optimizer"}], ids=str)
def test_auto_finds_the_micro_batch_before_the_first_step_and_leaves_no_trace(memory, undisturbed):
    require_recovered(run({"most": 7}, memory | {"micro_batch_size": "auto"}), undisturbed, 6, 2)  # 24, 12, 6


@pytest.mark.slow
def test_auto_finds_it_on_all_ranks(undisturbed, ranks, tmp_path):
    memory = {"strategy": "ddp", "micro_batch_size": "auto"}
    auto = ranks.run(run, {"most": 7, "rank": 1, "phase": "backward"}, memory, str(tmp_path))[0]
    require_recovered(auto, undisturbed, 6, 1)


def test_auto_with_enough_memory_changes_nothing():
    auto, whole = run({}, {"micro_batch_size": "auto"}), run({}, {"micro_batch_size": 24})
    assert error(auto, whole) == 0
    assert auto["losses"] == whole["losses"]


def test_a_later_epoch_of_larger_micro_batches_is_cut_though_the_first_cannot_be(undisturbed):
    disturbed = run({"most": 3}, {"micro_batch_size": "auto"}, accumulate={0: 24, 1: 3})
    assert error(disturbed, undisturbed) <= ROUNDING
    assert disturbed["summary"]["recoveries"] == 2  # 8, 4, 2
    assert disturbed["status"]["cut"] is None  # each epoch has one of its own


def test_a_micro_batch_of_one_sample_cannot_be_cut(tmp_path):
    with pytest.raises(OutOfMemoryError, match=r"out of memory in backward on rank 0.*try next: "):
        run({"most": 0, "phase": "backward"}, {}, tmp_path)
    assert read(tmp_path / "run", "summary")["status"] == "failed"
    assert (read(tmp_path / "run", "status")["status"], read(tmp_path / "run", "status")["attempt"]) == ("failed", 1)


def test_weights_that_are_updated_in_backward_cannot_be_taken_back(tmp_path):
    memory = {"optimizer_in_backward": True, "micro_batch_size": 24}
    with pytest.raises(OutOfMemoryError):
        run({"most": 3, "after": 2}, memory, tmp_path, Optim("adamw", lr=1e-3))


def test_a_run_that_must_not_recover_ends(tmp_path):
    with pytest.raises(OutOfMemoryError, match=r"try next: --memory\.micro_batch_size 4"):
        run({"most": 3}, {}, tmp_path, run={"recover": False})
