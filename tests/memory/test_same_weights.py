"""One seed gives one set of weights: on any device, by any technique and strategy."""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest
import torch
from helpers.combinations import covering
from helpers.matrix import launched
from helpers.pretrained import saved, text, vit
from helpers.problems import make_model
from lightning_fabric import Fabric
from lightning_fabric.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer import Data, Memory, Model, Recipe, RecipeError
from trainer.memory.initialize import build_module, build_on_host
from trainer.memory.plan import Plan, decide_plan
from trainer.memory.stack import PreparedModel, apply_stack, full_state_dict
from trainer.models import MLP
from trainer.models.lora import LoRA

SEED = 6
TYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
AXES = ("place", "cpu_offload", "init", "precision")
ADAPTERS = LoRA(rank=2, dropout=0.0)


MODELS = {
    "mlp": lambda folder: MLP([7], image_size=4, channels=3, num_classes=2),
    "vit": lambda folder: vit(),
    "vit, new head": lambda folder: vit(num_classes=3, weights=saved(folder, "vit")),
    "vit, adapters": lambda folder: vit(num_classes=3, weights=saved(folder, "vit"), lora=ADAPTERS),
    "text": lambda folder: text(),
    "text, new head": lambda folder: text(num_classes=3, weights=saved(folder, "text")),
    "text, adapters": lambda folder: text(num_classes=3, weights=saved(folder, "text"), lora=ADAPTERS),
    "bigbird": lambda folder: make_model("bigbird"),
}


# ------------------------------------------------------------------------------------------------- on another device


class HostDraws(TorchDispatchMode):
    """Notes every draw of the host's generator: what was drawn, and its state thereafter."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple[str, list[torch.Size], int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            shapes = [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_cpu]
            if shapes:
                self.draws.append((str(func), shapes, hash(bytes(torch.get_rng_state().tolist()))))
        return result


def elsewhere() -> Fabric:
    """A device that is not the host: torch's meta device, which can do all that a GPU can, but for results."""
    return Fabric(accelerator="cpu", strategy=SingleDeviceStrategy(torch.device("meta")))


@pytest.mark.parametrize("kind", MODELS)
def test_only_the_host_draws(tmp_path, kind):
    model = MODELS[kind](tmp_path)
    plan = plan_of(model, 1)
    drawn = {}
    for fabric in (elsewhere(), Fabric(accelerator="cpu", devices=1)):
        with HostDraws() as host:
            module = build_module(fabric, model, SEED, plan)
        assert {tensor.device for tensor in [*module.parameters(), *module.buffers()]} == {fabric.device}
        drawn[fabric.device.type] = host.draws
    assert drawn["meta"] == drawn["cpu"]
    assert len(drawn["cpu"]) >= (0 if kind == "vit, new head" else 2)  # torchvision's head starts at zero


def test_a_restored_model_is_built_on_the_host_and_one_that_fsdp_shards_is_not_whole_on_the_device():
    places = []

    def build() -> nn.Module:
        places.append(torch.get_default_device())
        return nn.Linear(2, 2)

    assert build_on_host(elsewhere(), plan_of(vit(), 1), build).weight.is_meta
    assert places == [torch.device("cpu")]
    sharded = plan_of(vit(), 2, strategy="fsdp")
    assert not build_module(elsewhere(), vit(), SEED, sharded).conv_proj.weight.is_meta


# ------------------------------------------------------------------------------------------------- by any technique


def plan_of(model: Model, ranks: int, **memory) -> Plan:
    recipe = Recipe(model=model, data=Data(), batch_size=4, memory=Memory(micro_batch_size=1, **memory))
    return decide_plan(recipe, ranks)


def configurations(model: Model, ranks: int, whole: bool) -> list[Plan]:
    """The ways to hold the weights on so many ranks that are not refused: all, or any two settings together."""
    strategies = [("auto", 1)] if ranks == 1 else [("ddp", 1), ("fsdp", 1), ("fsdp", 2)]
    found = []
    for place, offload, init, precision in product(
        strategies, ("none", "optimizer", "parameters"), ("device", "meta"), TYPES
    ):
        with suppress(RecipeError):
            wishes = {"cpu_offload": offload, "init": init, "precision": precision}
            plan = plan_of(model, ranks, strategy=place[0], replicas=place[1], **wishes)
            found.append({"place": place, **wishes, "plan": plan})
    return [one["plan"] for one in (found if whole else covering(found, 2, AXES))]


def stack_of(model: Model, plan: Plan) -> PreparedModel:
    fabric = launched(plan)
    return apply_stack(fabric, model, build_module(fabric, model, SEED, plan), plan, SEED)


def differing(model: Model, ranks: int, expected: dict[str, torch.Tensor], whole: bool) -> tuple[int, list[str]]:
    """How many configurations there are, and the tensors of each that are not as ``expected``; called on every rank."""
    plans, found = configurations(model, ranks, whole), []
    for plan in plans:
        state, precision = full_state_dict(stack_of(model, plan)), plan.memory.precision
        for name, tensor in state.items():
            if precision == "bf16-true" and plan.memory.cpu_offload == "optimizer":
                assert tensor.dtype == torch.float32, name  # a master
            if not torch.equal(tensor.to(TYPES[precision]), expected[f"{precision} {name}"]):
                found.append(f"{plan.describe()}: {name}")
        assert not state or len(state) == len(expected) / len(TYPES)
    return len(plans), found


def reference(model: Model) -> dict[str, torch.Tensor]:
    """The weights of one rank without any technique, in either precision."""
    states = {p: full_state_dict(stack_of(model, plan_of(model, 1, precision=p))) for p in TYPES}
    return {f"{precision} {name}": tensor for precision, state in states.items() for name, tensor in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "kind", "whole"),
    [
        (2, "vit, new head", False),
        pytest.param(2, "vit, new head", True, marks=pytest.mark.slow),
        pytest.param(2, "text, adapters", True, marks=pytest.mark.slow),
        pytest.param(2, "bigbird", True, marks=pytest.mark.slow),
        pytest.param(4, "text, new head", True, marks=pytest.mark.slow),
    ],
)
def test_one_seed_gives_the_same_weights_by_every_technique(ranks, tmp_path, kind, count, whole):
    model = MODELS[kind](tmp_path)
    expected = reference(model)
    assert differing(model, 1, expected, whole)[1] == []
    starts = 1 if kind == "bigbird" else 2  # on the device, and from meta tensors
    for number, found in ranks(count).run(differing, model, count, expected, whole):
        assert found == []
        # ddp without parameter offload, fsdp and hsdp: 2 + 3 + 3, in two precisions
        assert number == 16 * starts or not whole
