"""``optim.name muon``: owners, rows that travel, faults that must be found, the predicted state, and rejections."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.combinations import Trained, tower_file
from helpers.matrix import Case, difference, set_up, stacked_run, steps_of
from helpers.resumed import losses, saved
from helpers.rounding import EPS, ROUNDING
from helpers.tiny import prediction_of, recipe_of
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from trainer import Memory, Optim, RecipeError
from trainer.engine.memory_rehearsal import init_optimizer_state
from trainer.memory import muon
from trainer.memory.muon import Muon, newton_schulz_cost
from trainer.memory.optimizer import build_optimizer
from trainer.memory.parameter_groups import block_matrices
from trainer.memory.plan import decide_plan

MUON = Optim("muon", lr=1e-2, weight_decay=0.1, eps=EPS, clip_norm=1.0)
CASE = Case("vit", Memory(precision="64-true", micro_batch_size=3), optim=MUON)


def on(strategy: str, ranks: int, **memory: Any) -> Case:
    return dataclasses.replace(
        CASE, world_size=ranks, memory=dataclasses.replace(CASE.memory, strategy=strategy, **memory)
    )


def halves(matrix: Tensor, *options: Any) -> Tensor:
    """Orthogonalize parts of the rows, as if they were whole matrices."""
    return torch.cat([_zeropower_via_newtonschulz(half, *options) for half in matrix.chunk(2)])


def skipping() -> Callable[..., Tensor]:
    """Leave out one matrix."""
    calls = count()
    return lambda matrix, *options: (
        _zeropower_via_newtonschulz(matrix, *options) if next(calls) else torch.zeros_like(matrix)
    )


def swapped(sent: Any, sizes: Any, like: Tensor) -> list[list[Tensor]]:
    """Receive every element one place later. (The iteration commutes with a reversal of rows and columns.)"""
    return [[piece.roll(1) for piece in part] for part in EXCHANGE(sent, sizes, like)]


EXCHANGE = muon.exchange
FAULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "a part instead of the whole": lambda: {"_zeropower_via_newtonschulz": halves},
    "an owner that leaves out a matrix": lambda: {"_zeropower_via_newtonschulz": skipping()},
    "elements in another order": lambda: {"exchange": swapped},
}


@contextmanager
def fault(name: str | None) -> Iterator[None]:
    changes = FAULTS[name]() if name else {}
    before = {key: getattr(muon, key) for key in changes}
    vars(muon).update(changes)
    try:
        yield
    finally:
        vars(muon).update(before)


def trained(case: Case, name: str | None = None) -> dict[str, Any]:
    with fault(name):
        return stacked_run(case)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The run on one rank, which test_optimizers.py compares with torch's optimizers."""
    return stacked_run(on("single", 1))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (on("fsdp", 2), None),
        (on("fsdp", 2), "a part instead of the whole"),
        (on("fsdp", 2), "elements in another order"),
        (on("ddp", 2), "an owner that leaves out a matrix"),
        *(
            pytest.param(case, name, marks=pytest.mark.slow)
            for case in (on("ddp", 2), on("ddp", 4), on("fsdp", 4), on("fsdp", 4, replicas=2))
            for name in (None, *FAULTS)
        ),
    ],
)
def test_ranks_take_the_steps_of_one_rank_and_faults_are_found(case, name, ranks, alone):
    (found, *_) = ranks(case.world_size).run(trained, case, name)
    far = max(difference(found, alone).values())
    assert far <= ROUNDING if name is None else far > 1e6 * ROUNDING


TEXTS = dataclasses.replace(on("single", 1, micro_batch_size=4), name="distilbert")


@pytest.fixture(scope="module")
def texts_alone() -> dict[str, Any]:
    return stacked_run(TEXTS)


@pytest.mark.parametrize(
    ("strategy", "size", "name"),
    [
        ("ddp", 2, None),
        ("ddp", 2, "a part instead of the whole"),
        pytest.param("ddp", 4, None, marks=pytest.mark.slow),
        pytest.param("fsdp", 4, None, marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_ranks_take_the_steps_of_one_rank(strategy, size, name, ranks, texts_alone):
    memory = dataclasses.replace(TEXTS.memory, strategy=strategy, tensor_parallel=2)
    found = ranks(size).run(trained, dataclasses.replace(TEXTS, world_size=size, memory=memory), name)[0]
    far = max(difference(found, texts_alone).values())
    assert far <= ROUNDING if name is None else far > 1e6 * ROUNDING


def refused() -> str:
    case = dataclasses.replace(on("ddp", 2, tensor_parallel=2))
    with pytest.raises(RecipeError) as error:
        set_up(case, decide_plan(case.recipe, 2))
    return str(error.value)


def test_tensor_parallelism_that_cuts_a_matrix_into_queries_keys_and_values_is_rejected(ranks):
    for said in ranks(2).run(refused):
        assert re.search(r"in_proj_weight as one matrix, but memory\.tensor_parallel cuts it into 3: use", said)


def test_owners_have_about_the_same_work():
    optimizer = build_optimizer(
        [torch.zeros(size, requires_grad=True) for size in [(64, 16), (16, 64), (64, 64), (96, 64), (8, 8)]],
        MUON,
        Memory(),
        torch.device("cpu"),
    )
    assert isinstance(optimizer, Muon)
    parameters = list(optimizer.matrices)
    optimizer.ranks = 3
    owners = [matrix.owner for matrix in optimizer._assign(parameters)]
    assert owners == [2, 2, 1, 0, 2]
    assert newton_schulz_cost((96, 64)) == newton_schulz_cost((64, 96)) == 4 * 64 * 64 * 96 + 2 * 64**3


@pytest.mark.parametrize(
    ("name", "matrices", "others"),
    [
        ("vit", {"out_proj.weight", "mlp.0.weight"}, {"conv_proj.weight", "heads.head.weight", "class_token"}),
        ("distilbert", {"q_lin.weight", "lin1.weight"}, {"word_embeddings.weight", "classifier.weight"}),
    ],
)
def test_matrices_are_those_of_blocks_without_embeddings_and_head(name, matrices, others):
    module = recipe_of(name).model.build()
    found = block_matrices(module)
    named = dict(module.named_parameters())
    assert all(named[one].ndim == 2 for one in found)
    assert all(any(one.endswith(kind) for one in found) for kind in matrices)
    assert not any(one.endswith(kind) for one in found for kind in others)


def state_bytes(case: Case) -> int:
    """The bytes that the allocator of a GPU gives for this rank's state, in blocks of 512, without step counters."""
    _, stepper, windows, _ = set_up(case, decide_plan(case.recipe, case.world_size))
    (window,) = windows.epoch(*steps_of(case)[0], 1)
    stepper.step(window)
    values = [value for state in stepper.optimizer.state.values() for value in state.values()]
    sizes = [getattr(value, "_local_tensor", value).nbytes for value in values if value.ndim]
    return sum(-(-size // 512) * 512 for size in sizes)


@pytest.mark.first(1)
@pytest.mark.parametrize(("strategy", "size"), [("single", 1), pytest.param("fsdp", 2, marks=pytest.mark.slow)])
def test_the_planner_knows_the_state(strategy, size, ranks):
    memory = Memory(strategy=strategy, micro_batch_size=3)
    case = Trained("tower", memory, size, optim=MUON, weights=tower_file(), accumulate=None)
    recipe = recipe_of("tower", memory, MUON)
    predicted = prediction_of(recipe, size).categories["optimizer"]
    adamw = prediction_of(recipe_of("tower", memory), size).categories["optimizer"]
    module = recipe.model.build()
    elements = sum(dict(module.named_parameters())[name].numel() for name in block_matrices(module))
    assert adamw - predicted == pytest.approx(4 * elements / size, rel=0.05)
    measured = state_bytes(case) if size == 1 else ranks(2).run(state_bytes, case)[0]
    counters = 512 * (len(list(module.parameters())) - len(block_matrices(module)))  # of AdamW, on a GPU if fused
    assert measured <= predicted <= measured + counters


def test_zero_gradients_and_a_missing_gradient_move_nothing():
    weights = [nn.Parameter(torch.randn(4, 6)) for _ in range(2)]
    optimizer = build_optimizer(weights, MUON, Memory(), torch.device("cpu"))
    before = [weight.detach().clone() for weight in weights]
    init_optimizer_state(optimizer)
    weights[0].grad = torch.ones(4, 6)
    optimizer.step()
    assert torch.equal(weights[1], before[1])
    assert not torch.equal(weights[0], before[0])
    assert not optimizer.state[weights[1]]["momentum_buffer"].any()


@pytest.mark.parametrize(
    ("memory", "ranks", "said"),
    [
        ({"optimizer_in_backward": True, "strategy": "fsdp"}, 2, r"optimizer_in_backward updates one parameter .*muon"),
        ({"optimizer_state_bits": 8}, 1, r"optimizer_state_bits=8 requires adam or adamw, not optim\.name=muon"),
        ({"precision": "16-true"}, 1, r"16-true cannot be used with optim\.name=muon"),
    ],
)
def test_settings_that_muon_does_not_support_are_rejected(memory, ranks, said):
    optim = Optim("muon") if "optimizer_in_backward" in memory else MUON
    recipe = recipe_of("vit", optim=optim).replace(memory=Memory(**memory, micro_batch_size=12))
    with pytest.raises(RecipeError, match=said):
        decide_plan(recipe, ranks)


def test_arguments_are_those_of_torch_and_a_model_needs_matrices():
    build = partial(build_optimizer, memory=Memory(), device=torch.device("cpu"))
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(RecipeError, match=r"did you mean ns_steps"):
        build([weight], Optim("muon", arguments={"ns_step": 3}))
    with pytest.raises(RecipeError, match=r"Adjust learning rate function other is not supported"):
        build([weight], Optim("muon", arguments={"adjust_lr_fn": "other"}))
    with pytest.raises(RecipeError, match=r"found no trained matrix in the blocks of the model: use adamw"):
        build([nn.Parameter(torch.zeros(4))], Optim("muon"))
    for settings in ({"momentum": 0.9}, {"nesterov": True}):
        with pytest.raises(RecipeError, match=r"does not apply to muon: put it into optim\.arguments"):
            Optim("muon", **settings)


@pytest.mark.parametrize(
    "arguments", [{"ns_coefficients": [1, 2]}, {"ns_coefficients": ["a", 1, 2]}, {"ns_steps": 100}, {"ns_steps": 2.5}]
)
def test_arguments_that_the_first_step_would_reject_are_rejected_with_the_plan(arguments):
    recipe = recipe_of("vit", optim=Optim("muon", arguments=arguments)).replace(memory=Memory(micro_batch_size=12))
    with pytest.raises(RecipeError, match=rf"optim\.arguments=.*{next(iter(arguments))}.* fails in a trial"):
        decide_plan(recipe, 1)


KILLED = """
import dataclasses, os, signal, sys
from pathlib import Path

from helpers.resumed import OPTIM, recipe
from trainer import Checkpoint
from trainer.api import fit
from trainer.memory.muon import Muon

folder, kill_at, resumed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
update, calls = Muon._update, []

def killed(self, turn):
    calls.append(turn)
    if len(calls) == kill_at and self.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # the other rank waits for rows of this one
    update(self, turn)

Muon._update = killed
changes = {"optim": dataclasses.replace(OPTIM, name="muon"), "checkpoint": Checkpoint(every=2, asynchronous=False)}
fit(recipe(folder, memory={"strategy": "fsdp"}, run={"resume": resumed} if resumed else {}, **changes))
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_within_an_exchange_changes_no_loss(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)

    def launch(folder: str, kill_at: int = 0, resumed: str = "") -> int:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
        paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, tmp_path / folder, str(kill_at), resumed], env=environment, capture_output=True, timeout=240
        )
        return done.returncode

    assert launch("whole") == 0
    assert launch("broken", kill_at=4) != 0  # a turn per step: step 2 is saved
    assert [path.name for path in (tmp_path / "broken" / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert launch("broken", resumed="auto") == 0
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert saved(tmp_path / "broken", 6) == saved(tmp_path / "whole", 6)
