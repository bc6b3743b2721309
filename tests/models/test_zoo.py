"""Foreign architectures, whichever way they are trained: exact, or refused in one line that names what cannot be.

A few of them in every run, all of them with ``pytest -m slow tests/models/test_zoo.py``.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from helpers.rounding import ROUNDING
from zoo import ALL, Case, Outcome, Zoo, ZooOfTransformers, collate, error, make, run, samples

from trainer import Data, Memory, Optim, Recipe
from trainer.errors import RecipeError
from trainer.memory.activation_checkpointing import checkpoint_blocks
from trainer.memory.compatibility import require_sparse_support, require_supported_parameters
from trainer.memory.plan import decide_plan
from trainer.models.base import parameters_after_blocks
from trainer.weights.blocks import describe_blocks, disable_kv_cache, find_blocks, kv_cache_restored

pytestmark = pytest.mark.usefixtures("no_pictures")

RANKS = {"single": 1, "ddp": 2, "fsdp": 2}
REFUSED = {
    ("scale", "fsdp"): "memory.strategy=fsdp cannot train scale, which has no dimension: give it the shape (1,)",
    ("sparse", "fsdp"): "memory.strategy=fsdp cannot train embed.weight, which has sparse gradients",
    ("complex", "fsdp"): "memory.strategy=fsdp cannot train filter, which is complex",
    ("penalty", "fsdp"): "memory.strategy=fsdp cannot compute second-order gradients (create_graph=True)",
    ("penalty", "selective"): "cannot compute second-order gradients (create_graph=True)",
}
BATCH_NORM = ("batch", "resnet18", "mobilenet")
"""The whole batch on one rank: else they normalise by other statistics, see tests/memory/test_batchnorm.py."""


def outcome_of(case: Case, ranks: object, folder: object) -> Outcome:
    """The first rank's, of a run that ended alike on all ranks."""
    if case.world_size == 1:
        return run(case, str(folder))
    outcomes = ranks(case.world_size).run(run, case, str(folder))
    assert len({outcome.code for outcome in outcomes}) == 1, [outcome.errors for outcome in outcomes]
    return outcomes[0]


def check(name: str, strategy: str, checkpointing: str | float, ranks: object, folder: object) -> str:
    """Train; what came of it, in words."""
    precision = "32-true" if name == "complex" else "64-true"  # of which safetensors has no complex numbers
    most = 8 if name in BATCH_NORM else 3
    knobs = {"strategy": strategy, "activation_checkpointing": checkpointing, "precision": precision}
    case = Case(name, Memory(micro_batch_size=most, **knobs), RANKS[strategy])
    outcome = outcome_of(case, ranks, folder)
    refusal = REFUSED.get((name, strategy)) or REFUSED.get((name, checkpointing))
    if refusal is not None:
        assert (outcome.code, len(outcome.errors)) == (2, 1), outcome.stderr
        assert outcome.errors[0].startswith("trainer: error: ")
        assert refusal in outcome.errors[0]
        return "refused"
    assert outcome.code == 0, outcome.stderr
    off = error(case, outcome)
    assert off <= {"32-true": 2e-6, "64-true": ROUNDING}[precision]
    return f"{off:.0e}"


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "strategy", "checkpointing"),
    [
        ("gpt2", "single", "full"),
        ("t5", "single", 0.5),
        ("bart", "single", "selective"),
        ("penalty", "single", "full"),
        ("penalty", "single", "selective"),
        ("complex", "single", "none"),
        ("scale", "ddp", "none"),
        ("sparse", "ddp", "none"),
        ("t5", "fsdp", "none"),
        ("shared_block", "fsdp", "full"),
        ("penalty", "fsdp", "none"),
    ],
)
def test_it_is_exact_or_refused(name, strategy, checkpointing, ranks, tmp_path):
    check(name, strategy, checkpointing, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_all_of_them_are_exact_or_refused(name, ranks, tmp_path, record_property):
    wishes = {"single": ("none", "selective"), "ddp": ("none",), "fsdp": ("full",)}
    row = {}
    for strategy in ("single",) if name in BATCH_NORM else wishes:
        for checkpointing in wishes[strategy]:
            folder = tmp_path / f"{strategy}-{checkpointing}"
            folder.mkdir()
            row[f"{strategy} {checkpointing}"] = check(name, strategy, checkpointing, ranks, folder)
    record_property("table", f"{name}: " + ", ".join(f"{cell} {value}" for cell, value in row.items()))


def plan_of(**knobs):
    memory = Memory(micro_batch_size=1, **knobs)
    return decide_plan(Recipe(model=Zoo(), data=Data(), optim=Optim("sgd"), batch_size=2, memory=memory), 2)


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        *[(name, {"strategy": strategy}, text) for (name, strategy), text in REFUSED.items() if name != "penalty"],
        ("sparse", {"cpu_offload": "optimizer"}, "memory.cpu_offload=optimizer cannot train embed.weight"),
        ("complex", {"cpu_offload": "optimizer"}, "memory.cpu_offload=optimizer cannot train filter"),
        ("complex", {"precision": "64-true"}, "memory.precision=64-true cannot train filter, which is complex"),
    ],
)
def test_parameters_that_a_technique_cannot_hold_are_refused(name, knobs, message):
    with pytest.raises(RecipeError, match=f"^{re.escape(message)}"):
        require_supported_parameters(make(name), plan_of(**knobs), Zoo())


@pytest.mark.slow
def test_a_sharded_checkpointed_and_offloaded_model_is_saved_once_as_transformers_would(ranks, tmp_path):
    from transformers import GPT2LMHeadModel

    knobs = {"strategy": "fsdp", "activation_checkpointing": "full", "cpu_offload": "parameters"}
    case = Case("gpt2", Memory(micro_batch_size=3, precision="64-true", **knobs), 2, kind=ZooOfTransformers)
    outcome = outcome_of(case, ranks, tmp_path)
    assert error(case, outcome) <= ROUNDING
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["use_cache"] is True
    module = GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "model", dtype=torch.float64)
    assert module.lm_head.weight is module.transformer.wte.weight
    assert torch.equal(module.lm_head.weight, outcome.state["transformer.wte.weight"])


def test_a_run_says_what_its_blocks_are_and_which_are_gathered_with_the_rest(ranks, tmp_path):
    memory = Memory(strategy="fsdp", micro_batch_size=3)
    outcome = outcome_of(Case("shared_weight", memory, 2), ranks, tmp_path)
    assert re.search(r"Zoo: [\d,]+ parameters \(blocks: 3 Block\);", outcome.stderr)
    assert "warning: memory.strategy=fsdp keeps 2 of 3 blocks whole during a micro-step" in outcome.stderr


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("t5", "4 T5Block"),
        ("bart", "2 BartEncoderLayer + 2 BartDecoderLayer"),
        ("gpt2", "3 GPT2Block"),
        ("albert", "1 AlbertLayerGroup"),
        ("deberta", "3 DebertaV2Layer"),
        ("hf_vit", "3 ViTLayer"),
        ("convnext", "3 CNBlock"),
        ("resnet18", "8 BasicBlock"),
        ("group", "3 Sequential"),
        ("shared_block", "2 Block"),
    ],
)
def test_blocks_are_those_of_all_stacks_each_once(name, blocks):
    assert describe_blocks(find_blocks(make(name))) == blocks


def test_the_head_is_what_follows_the_last_stack():
    module = make("bart")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    head = [names[id(parameter)] for parameter in parameters_after_blocks(module, find_blocks(module))]
    assert head == ["model.decoder.layernorm_embedding.weight", "model.decoder.layernorm_embedding.bias"]


@pytest.mark.parametrize("wish", ["full", "selective"])
def test_a_cache_that_would_be_filled_twice_is_refused(wish):
    module = make("gpt2")
    checkpoint_blocks(module, find_blocks(module), wish)
    ids = collate(samples("gpt2"))["input_ids"]
    assert module(input_ids=ids).past_key_values is None
    with pytest.raises(RecipeError, match=r"computes GPT2Block twice.*use_cache=False"):
        module(input_ids=ids, use_cache=True)
    with torch.no_grad():
        assert module(input_ids=ids, use_cache=True).past_key_values is not None  # nothing is computed twice


def test_a_cache_is_switched_off_until_the_model_is_saved():
    module = make("t5")
    configs = [module.config, module.decoder.config]
    disable_kv_cache(module)
    disable_kv_cache(module)  # the model itself, and then the memory stack
    assert [config.use_cache for config in configs] == [False, False]
    with kv_cache_restored(module):
        assert [config.use_cache for config in configs] == [True, True]
        assert module.encoder.config.use_cache is False  # as transformers made it
    assert [config.use_cache for config in configs] == [False, False]


@pytest.mark.parametrize("optim", [Optim("adamw", lr=0.1), Optim("sgd", lr=0.1, weight_decay=0.1)], ids=str)
def test_what_cannot_update_sparsely_is_refused(optim):
    with pytest.raises(RecipeError, match=r"optim\.name=.* cannot update embed\.weight, which has sparse gradients"):
        require_sparse_support(make("sparse"), optim)


@pytest.mark.parametrize(
    "optim", [Optim("sgd", lr=0.1, clip_norm=0.05), Optim("adagrad", lr=0.1)], ids=["sgd, clipped", "adagrad"]
)
def test_sparse_gradients_update_as_dense_ones(optim, tmp_path):
    case = Case("sparse", Memory(micro_batch_size=3, precision="64-true"), optim=optim)
    assert error(case, run(case, str(tmp_path))) <= ROUNDING
