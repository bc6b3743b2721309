"""Adapters: what trains, that accumulation stays exact with them, and that what is saved needs them no more."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

import pytest
import torch
from helpers.matrix import Case, difference, perturbed, plain_run, stacked_run
from helpers.problems import (
    Problem,
    collate,
    engine_run,
    errors,
    make_fabric,
    make_model,
    make_samples,
    tokenizer_folder,
)
from helpers.rounding import ROUNDING
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from trainer import Memory, Optim, RecipeError
from trainer.checkpoint.export import load_model, save_model
from trainer.memory.optimizer import build_optimizer
from trainer.memory.parameter_groups import update_rule_for
from trainer.models import LoRA, TextClassifier
from trainer.models.lora import adapters_of, add_adapters
from trainer.weights.blocks import find_blocks
from trainer.weights.nf4 import NF4Linear
from trainer.weights.streaming import build_streamed

MODELS = ["vit", "distilbert", "bigbird"]
FIRST_TARGETS = {
    "vit": {"mlp.0", "mlp.3"},
    "distilbert": {f"attention.{name}" for name in ("q_lin", "k_lin", "v_lin", "out_lin")},
    "bigbird": {f"attention.{name}" for name in ("self.query", "self.key", "self.value", "output.dense")},
}
TRANSPOSED = ["c_attn", "mlp.c_fc"]
HEADS = {
    "vit": {"encoder.ln", "heads.head"},
    "distilbert": {"pre_classifier", "classifier"},
    "bigbird": {"classifier.dense", "classifier.out_proj"},
}


def adapted(name, **options):
    return dataclasses.replace(make_model(name), lora=LoRA(**{"rank": 2, **options}))


def built(model, dtype=torch.float64):
    """A module whose adapters are past their start, at which they do nothing."""
    torch.manual_seed(0)
    return perturbed(model.build().to(dtype))


def batch_of(name, count=6):
    problem = Problem(name, count, count, count)
    batch = collate(make_samples(problem))
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def logits(model, module, batch):
    (loss,) = model.losses(module.eval(), batch)
    return loss.logits


@pytest.mark.parametrize("name", MODELS)
def test_adapters_and_the_head_train_and_nothing_else(name):
    module = adapted(name).build()
    trained = {parameter for parameter, p in module.named_parameters() if p.requires_grad}
    adapters = {parameter for parameter in trained if ".lora_" in parameter}
    assert {parameter.rsplit(".", 1)[0] for parameter in trained - adapters} == HEADS[name]
    assert {p.shape[0] for n, p in module.named_parameters() if ".lora_A." in n} == {2}
    assert not any(p.any() for n, p in module.named_parameters() if ".lora_B." in n)  # it computes what it did before
    layers = {parameter.split(".lora_")[0] for parameter in adapters}
    assert len(layers) == 2 * len(FIRST_TARGETS[name])  # of two blocks
    assert all(any(layer.endswith(f".{target}") for target in FIRST_TARGETS[name]) for layer in layers)
    assert not any("lora_" in parameter for parameter, _ in make_model(name).build().named_parameters())


def engine_answer(problem, world_size):
    """Three SGD steps of our engine on an adapted model."""
    model = adapted(problem.name)
    return engine_run(problem, world_size, of=(model, built(model).train()))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_accumulation_stays_exact_on_any_number_of_ranks(name, ranks):
    """Whole batches on one rank are those of a plain loop: tests/engine/test_equality.py."""
    whole, cut = (Problem(name, 11, 7, size) for size in (7, 2))
    expected = engine_answer(whole, 1)
    for answer in [engine_answer(cut, 1), *(ranks(2).run(engine_answer, cut, 2) if name != "distilbert" else ())]:
        found = errors(answer, expected)
        assert max(found.values()) < 100 * ROUNDING, found  # adapters change a hundredth of what weights are


@dataclass(frozen=True)
class WithDora(Case):
    @property
    def model(self):
        return adapted(self.name, dora=True)


FSDP = {"strategy": "fsdp", "activation_checkpointing": "full"}
QUICK_STEPS = [("distilbert", 2, {"strategy": "ddp"}), ("vit", 2, FSDP)]
MORE_STEPS = [
    ("vit", 2, {"strategy": "ddp"}),
    ("distilbert", 2, {**FSDP, "cpu_offload": "parameters"}),
    ("bigbird", 2, {"strategy": "fsdp", "cpu_offload": "optimizer"}),
    ("distilbert", 1, {"compile": "blocks"}),
    ("vit", 1, {"compile": "model"}),
    ("vit", 2, {**FSDP, "compile": "blocks"}),
]


@pytest.mark.parametrize(
    ("name", "count", "knobs"), [*QUICK_STEPS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_STEPS)]
)
def test_steps_with_dora_are_those_of_a_plain_loop(name, count, knobs, ranks):
    case = WithDora(name, Memory(precision="64-true", micro_batch_size=3, **knobs), count)
    plain = plain_run(dataclasses.replace(case, memory=Memory(precision="64-true"), world_size=1))
    found = difference(ranks(count).run(stacked_run, case)[0], plain)
    assert max(found.values()) <= ROUNDING, found


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_gives_the_outputs_of_the_trained_one(name, tmp_path):
    from transformers import AutoModelForSequenceClassification

    model = adapted(name, alpha=3.0)
    module = built(model, torch.float32)
    assert type(module) is type(make_model(name).build())
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in batch_of(name).items()}
    trained = logits(model, module, inputs)
    save_model(model, module, tmp_path)
    assert torch.equal(logits(model, module, inputs), trained)  # saving leaves it as it was
    loaded = load_model(model, tmp_path)
    assert loaded.state_dict().keys() == make_model(name).build().state_dict().keys()
    torch.testing.assert_close(logits(model, loaded, inputs), trained, rtol=1e-5, atol=1e-6)
    if name == "distilbert":
        theirs = AutoModelForSequenceClassification.from_pretrained(next(tmp_path.rglob("config.json")).parent).eval()
        torch.testing.assert_close(logits(model, theirs, inputs), trained, rtol=1e-5, atol=1e-6)
    for parameter, value in module.named_parameters():
        if ".lora_B." in parameter:
            value.data.zero_()
    assert not torch.allclose(logits(model, module, inputs), trained, rtol=1e-3)  # the adapters did matter


def _merged_from_shards(name, **options):
    """Logits of a sharded, adapted model after a step, and those of a plain model with its merged weights."""
    make_fabric("64-true", torch.distributed.get_world_size())
    model, batch = adapted(name, **options), batch_of(name)
    module = built(model).train()
    for block in find_blocks(module, model.blocks):
        fully_shard(block)
    fully_shard(module)
    (loss,) = model.losses(module, batch)
    loss.total.backward()
    torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01).step()
    trained = logits(model, module, batch)
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    plain = make_model(name).build().double()
    plain.load_state_dict(model.merged_state(module, state))
    return (logits(make_model(name), plain, batch) - trained).abs().max().item()


def _dora_merged_from_shards():
    return _merged_from_shards("bigbird", dora=True)


def test_a_sharded_model_is_merged_from_its_whole_state(ranks):
    assert max(ranks(2).run(_merged_from_shards, "bigbird")) < 100 * ROUNDING
    assert max(ranks(2).run(_dora_merged_from_shards)) < 100 * ROUNDING


def gpt2(**options):
    config = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64}
    model = TextClassifier("gpt2", tokenizer=tokenizer_folder(), config=config, num_classes=5, dropout=0.0)
    return dataclasses.replace(model, lora=LoRA(rank=2, targets=TRANSPOSED, **options))


def merging_error(model, batch):
    """The largest difference of logits between an adapted module, past its start, and one with its merged weights."""
    torch.manual_seed(0)
    module = perturbed(model.build().double())
    plain = dataclasses.replace(model, lora=LoRA()).build().double()
    plain.load_state_dict(model.merged_state(module, module.state_dict()))
    return (logits(model, plain, batch) - logits(model, module, batch)).abs().max().item()


@pytest.mark.parametrize("options", [{"dora": True}, {"rank_stabilized": True}], ids=str)
@pytest.mark.parametrize("name", [*MODELS, "gpt2"])
def test_dora_and_rank_stabilized_adapters_are_merged_exactly(name, options, monkeypatch):
    model = gpt2(**options) if name == "gpt2" else adapted(name, **options)
    batch = batch_of("distilbert" if name == "gpt2" else name)
    assert merging_error(model, batch) < 100 * ROUNDING
    if "dora" in options:  # without the norms
        monkeypatch.setattr("trainer.models.lora._norms_of", lambda layer, transform, weight: torch.ones(()))
    else:
        monkeypatch.setattr("trainer.models.lora._update", lambda module, path, state: torch.zeros(()))
    assert merging_error(model, batch) > 1e-6


def test_a_rank_stabilized_output_is_scaled_by_the_root_of_the_rank():
    plain, stabilized = (adapted("distilbert", alpha=3.0, rank_stabilized=on).build() for on in (False, True))
    scalings = [
        next(m.scaling["default"] for m in each.modules() if "lora_A" in vars(m).get("_modules", {}))
        for each in (plain, stabilized)
    ]
    assert scalings == [3 / 2, 3 / 2**0.5]


@pytest.mark.parametrize("transposed", [False, True])
def test_the_norms_of_dora_are_those_of_the_weights_however_they_are_loaded(transposed, tmp_path):
    model = gpt2() if transposed else make_model("distilbert")
    torch.manual_seed(0)
    save_model(model, dataclasses.replace(model, lora=LoRA()).build(), tmp_path)
    source = {"name": str(tmp_path), "weights": str(tmp_path), "config": {}}
    model = dataclasses.replace(model, **source, lora=LoRA(rank=2, dora=True, targets=model.lora.targets))
    torch.manual_seed(3)
    loaded = dict(model.build().named_parameters())
    torch.manual_seed(3)
    streamed = dict(build_streamed(model).named_parameters())
    assert sum("magnitude" in name for name in loaded) == (4 if transposed else 8)
    assert loaded.keys() == streamed.keys()
    for name, parameter in loaded.items():
        if "magnitude" in name:
            weight = loaded[name.partition(".lora_")[0] + ".base_layer.weight"].detach()
            expected = weight.norm(dim=0 if transposed else 1)
            torch.testing.assert_close(parameter.detach(), expected)
            torch.testing.assert_close(streamed[name].detach(), expected)
            assert parameter.requires_grad
        else:
            assert torch.equal(parameter, streamed[name])


def test_the_matrices_b_get_another_learning_rate_by_a_group():
    module = adapted("distilbert").build()
    optim = Optim("adamw", lr=1e-4, groups={"*.lora_B.*": {"lr_scale": 16}})
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rules = {p: update_rule_for(p, optim, name) for name, p in named.items()}
    optimizer = build_optimizer(rules, optim, Memory(), torch.device("cpu"))
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates.keys() == set(named.values())
    for name, parameter in named.items():
        assert rates[parameter] == pytest.approx(16e-4 if ".lora_B." in name else 1e-4)


@pytest.mark.parametrize(("base", "targets"), [("full", TRANSPOSED), ("nf4", TRANSPOSED), ("nf4", None)], ids=str)
def test_transposed_layers_are_merged_transposed_as_what_their_codes_stand_for(base, targets, tmp_path):
    config = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64}
    model = TextClassifier("gpt2", tokenizer=tokenizer_folder(), config=config, num_classes=5, dropout=0.0)
    model = dataclasses.replace(model, lora=LoRA(rank=2, targets=targets, base=base))
    torch.manual_seed(0)
    module, inputs = model.build(), batch_of("distilbert")
    assert sum(isinstance(part, NF4Linear) for part in module.modules()) == (8 if base == "nf4" else 0)
    with torch.no_grad():
        for name in adapters_of(module):
            module.get_parameter(name).normal_(std=0.1)
    trained = logits(model, module, inputs)
    save_model(model, module, tmp_path)
    loaded = model.saved_in(tmp_path).build()
    assert not any(isinstance(part, NF4Linear) for part in loaded.modules())
    torch.testing.assert_close(logits(model, loaded, inputs), trained, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS[:2])
def test_adapters_have_the_type_and_device_of_their_weights(name):
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert {p.dtype for p in adapted(name).build().parameters()} == {torch.bfloat16}
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert all(p.is_meta for p in adapted(name).build().parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adapted("vit", targets=["out_proj"]).build(), r"ends in 'out_proj': choose from mlp\.0, mlp\.3$"),
        (lambda: adapted("vit", targets=["self_attention"]).build(), r"choose from mlp\.0, mlp\.3$"),
        (
            lambda: adapted("distilbert", targets=["q_lin", "query"]).build(),
            r"ends in 'query': choose from attention\.q_lin, .*, ffn\.lin1, ffn\.lin2$",
        ),
        (lambda: adapted("distilbert", targets=["lin"]).build(), "no linear layer's name in a block ends in 'lin'"),
        (lambda: LoRA(rank=-1), r"model\.lora\.rank=-1 must be an integer of at least 0"),
        (lambda: LoRA(rank=2, alpha=0.0), r"model\.lora\.alpha=0\.0 must be greater than 0"),
        (lambda: LoRA(rank=2, dropout=1.0), r"model\.lora\.dropout=1\.0 must be in"),
        (lambda: LoRA(rank=2, targets=[]), r"model\.lora\.targets=\[\] adapts no layers"),
        (lambda: LoRA(rank=2, base="int4"), r"model\.lora\.base='int4' .*nf4"),
        (lambda: LoRA(dora=True), r"model\.lora\.dora needs adapters: set model\.lora\.rank"),
        (lambda: LoRA(rank_stabilized=True), r"model\.lora\.rank_stabilized needs adapters"),
        (lambda: LoRA(rank=2, dora=True, base="nf4"), r"model\.lora\.dora takes norms .*nf4 rounds"),
        (
            lambda: add_adapters(
                make_model("distilbert").build(), LoRA(2, None, 0.0, ["classifier"], dora=True), head=False
            ),
            r"model\.lora\.dora cannot adapt classifier, a layer outside of the blocks",
        ),
        (lambda: LoRA(base="nf4"), r"lora\.base=nf4 needs frozen weights, but model\.lora\.rank=0 trains them"),
        *(
            # Adapters and whole blocks are not both trained.
            (
                lambda name=name: dataclasses.replace(adapted(name), train_last_blocks=1),
                r"model\.lora\.rank=2 .*model\.train_last_blocks=1 .*use one of the two",
            )
            for name in MODELS[:2]
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(RecipeError, match=message):
        make()


def test_without_peft_the_way_to_get_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    message = r"model\.lora\.rank=2 needs the package peft .*pip install 'exactbatch-trainer\[lora\]'"
    with pytest.raises(RecipeError, match=message):
        adapted("vit").build()
    make_model("vit").build()  # rank 0 needs no package
