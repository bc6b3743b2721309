"""Frozen weights in NF4: training beside them is training beside the weights that they stand for, however it is cut."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.language import language_model, language_samples
from helpers.live_bytes import LiveBytes
from helpers.matrix import Case, difference, launched, plain_run, stacked_run
from helpers.pretrained import saved, text, vit
from helpers.problems import collate
from helpers.rounding import ROUNDING
from safetensors.torch import load_file, save_file
from torch import nn

from trainer import Data, Memory, Recipe, RecipeError
from trainer.memory.initialize import build_module
from trainer.memory.plan import decide_plan
from trainer.memory.sharding import local_shard
from trainer.memory.stack import apply_stack, full_state_dict
from trainer.models import LoRA
from trainer.models.lora import adapters_of, base_parameter_name, dequantised_in_place
from trainer.weights.nf4 import (
    BYTES_PER_ROW,
    NF4_LEVELS,
    WEIGHTS_PER_ROW,
    WEIGHTS_PER_SCALE,
    NF4Linear,
    count_weights,
    dequantise,
    quantise,
)
from trainer.weights.streaming import WeightFiles, tensors_in

MAKE = {"text": partial(text, dropout=0.0), "vit": partial(vit, image_size=8)}
EXACT = {"64-true": ROUNDING, "32-true": 1e-6}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Weights of both kinds of model, and what NF4 makes of them, in full: by kind, the two paths."""
    found = {}
    for kind in MAKE:
        folders = [tmp_path_factory.mktemp(f"{kind}-{name}") for name in ("plain", "rounded")]
        paths = [saved(folder, kind, **MAKE[kind].keywords) for folder in folders]
        file = Path(paths[1], "model.safetensors") if kind == "text" else Path(paths[1])
        state = load_file(file)
        module = adapted(kind, paths[0]).build()
        layers = {name: part for name, part in module.named_modules() if isinstance(part, NF4Linear)}
        assert len(layers) == (18 if kind == "text" else 6)  # of three blocks; torchvision's attention calls no layer
        for name, layer in layers.items():
            state[base_parameter_name(f"{name}.codes")] = layer.weight
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file, {"format": "pt"})
        found[kind] = paths
    return found


def adapted(kind, weights, base="nf4", **lora):
    return MAKE[kind](weights=weights, lora=LoRA(rank=2, base=base, **lora))


@dataclass(frozen=True)
class Adapted(Case):
    """Adapters of rank 2 beside weights of a file."""

    weights: str = ""
    base: str = "nf4"

    @property
    def model(self):
        return adapted(self.name, self.weights, self.base)

    @property
    def samples(self):
        known = {"text": "distilbert", "vit": "vit"}[self.name]
        return Case(known, self.memory, size=self.size).samples

    def prepared(self, module):
        return module


def trained(run, model):
    """Without what is frozen, which is the same by definition."""
    names = {name for name, p in model.build().named_parameters() if p.requires_grad}
    return {**run, "state": {name: tensor for name, tensor in run["state"].items() if name in names}}


FSDP = {"strategy": "fsdp", "micro_batch_size": 2}
RUNS = [
    ("vit", 1, {"precision": "64-true", "micro_batch_size": 3}),
    ("text", 1, {"precision": "64-true", "activation_checkpointing": "full", "activation_offload": True}),
    ("text", 2, {"precision": "64-true", **FSDP, "init": "meta", "activation_checkpointing": "full"}),
]
MORE = [
    ("text", 2, {"precision": "64-true", "micro_batch_size": 2}),
    ("text", 2, {"precision": "32-true", **FSDP, "cpu_offload": "optimizer"}),
    ("vit", 3, {"precision": "64-true", **FSDP, "init": "meta"}),
    ("vit", 1, {"precision": "32-true", "cpu_offload": "parameters"}),
    ("text", 1, {"precision": "64-true", **FSDP}),
    ("text", 1, {"precision": "64-true", "compile": "blocks"}),
    ("vit", 2, {"precision": "64-true", "micro_batch_size": 2, "activation_checkpointing": "full", "init": "meta"}),
    ("vit", 2, {"precision": "32-true", **FSDP, "cpu_offload": "parameters"}),
    ("text", 2, {"precision": "32-true", "micro_batch_size": 2, "cpu_offload": "optimizer"}),
    ("text", 3, {"precision": "64-true", "micro_batch_size": 1}),
]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("kind", "count", "knobs"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE)]
)
def test_it_trains_as_beside_the_weights_that_the_codes_stand_for(kind, count, knobs, files, ranks):
    weights, rounded = files[kind]
    case = Adapted(kind, Memory(**knobs), count, weights=weights)
    whole = Memory(precision=case.memory.precision)  # whole batches
    other = dataclasses.replace(case, weights=rounded, base="full", memory=whole, world_size=1)
    ours = ranks(count).run(stacked_run, case)[0]
    found = difference(trained(ours, case.model), trained(plain_run(other), other.model))
    assert max(found.values()) <= EXACT[case.memory.precision], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "knobs"),
    [
        (1, {"precision": "bf16-mixed"}),
        (1, {"precision": "16-mixed", "optimizer_state_bits": 8}),
        pytest.param(1, {"precision": "bf16-mixed", "cpu_offload": "optimizer"}, marks=pytest.mark.slow),
        pytest.param(2, {"precision": "bf16-mixed", **FSDP}, marks=pytest.mark.slow),
        pytest.param(2, {"precision": "bf16-mixed", **FSDP, "cpu_offload": "optimizer"}, marks=pytest.mark.slow),
        pytest.param(2, {"precision": "16-mixed", **FSDP}, marks=pytest.mark.slow),
    ],
)
def test_in_half_precision_it_computes_what_lora_does_bit_for_bit(count, knobs, files, ranks):
    weights, rounded = files["text"]
    case = Adapted("text", Memory(**knobs), count, weights=weights)
    other = dataclasses.replace(case, weights=rounded, base="full")
    ours, theirs = (trained(ranks(count).run(stacked_run, one)[0], one.model) for one in (case, other))
    assert ours["losses"] == theirs["losses"]
    assert all(torch.equal(ours["state"][name], tensor) for name, tensor in theirs["state"].items())


def built(model, ranks, **knobs):
    """A module that is not trained yet."""
    plan = decide_plan(Recipe(model=model, data=Data(), batch_size=4, memory=Memory(**knobs)), ranks)
    fabric = launched(plan)
    return apply_stack(fabric, model, build_module(fabric, model, 0, plan), plan)


def built_sharded(model, count):
    return built(model, count, strategy="fsdp", init="meta")


def state_of(model, count):
    return full_state_dict(built_sharded(model, count))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", pytest.param("text", marks=pytest.mark.slow)])
def test_the_codes_are_those_of_the_whole_file_on_any_number_of_ranks(kind, files, ranks):
    weights, _ = files[kind]
    model, places = adapted(kind, weights), tensors_in(weights)
    one = full_state_dict(built(model, 1))
    with WeightFiles() as opened:
        for name in [name for name in one if name.endswith(".codes")]:
            place, _ = places[base_parameter_name(name)]
            assert torch.equal(one[name], quantise(opened.read(place.file, place.key))), name
    for count in (2, 3):
        found = ranks(count).run(state_of, model, count)[0]
        assert found.keys() == one.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in one.items()), count


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["text", "vit", "pickle"])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_the_codes_are_of_the_file_in_any_precision_and_however_it_is_loaded(kind, offload, files, tmp_path):
    weights, _ = files["vit" if kind == "pickle" else kind]
    expected = adapted("vit" if kind == "pickle" else kind, weights).build().state_dict()
    if kind == "pickle":
        torch.save(load_file(weights), weights := str(tmp_path / "w.pth"))
    for init in ["device", "meta"][: 1 if kind == "pickle" else 2]:
        model = adapted("text" if kind == "text" else "vit", weights)
        found = full_state_dict(built(model, 1, precision="bf16-true", cpu_offload=offload, init=init))
        for name in [name for name in expected if name.endswith(".codes")]:
            assert torch.equal(found[name], expected[name]), (init, name)


def most_bytes(build, model, count):
    """The most bytes of tensors that live while this rank's part of ``model`` is made, and those that it takes then."""
    with LiveBytes() as live:
        stack = build(model, count)
    return live.peak, sum(local_shard(parameter).nbytes for parameter in stack.module.parameters())


@pytest.mark.parametrize(("count", "build"), [(2, built_sharded), pytest.param(1, built, marks=pytest.mark.slow)])
def test_no_rank_ever_holds_more_than_its_codes_and_what_becomes_of_one_weight(count, build, ranks, tmp_path):
    config = {"n_layers": 2, "dim": 256, "hidden_dim": 256, "n_heads": 2, "max_position_embeddings": 16}
    weights = saved(tmp_path, "text", config=config)
    model = text(config=config, weights=weights, lora=LoRA(rank=2, base="nf4"))
    whole, largest = 4 * count_weights(model.build()).parameters, 4 * 256 * 256
    for peak, own in ranks(count).run(most_bytes, build, model, count):
        assert own < 0.25 * whole / count
        assert peak < min(own + 5 * largest, 0.6 * whole)  # worked on at a time, in several copies


def test_the_codes_are_those_of_torchao():
    """Which has the sixteen values to four digits, so that some few weights between two of them get the other one."""
    tensor = pytest.importorskip("torchao.quantization").NF4Tensor
    weight = torch.randn(128, 512, generator=torch.Generator().manual_seed(0)) / 50
    codes, theirs = quantise(weight), tensor.from_tensor(weight, WEIGHTS_PER_SCALE, 256)
    assert codes.shape == (weight.numel() // WEIGHTS_PER_ROW, BYTES_PER_ROW)
    assert (codes[:, : WEIGHTS_PER_ROW // 2].flatten() != theirs.quantized_data).float().mean() < 1e-3
    own = dequantise(codes, tuple(weight.shape), torch.float32)
    assert (own - weight).square().mean() < 1.01 * (theirs.get_original_weight() - weight).square().mean()


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 64), (66, 131)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_weight_becomes_the_nearest_of_the_values_times_its_scale(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = dequantise(quantise(weight), shape, dtype)
    assert found.shape == weight.shape
    assert found.dtype == dtype
    flat = nn.functional.pad(weight.flatten().double(), (0, -weight.numel() % WEIGHTS_PER_SCALE)).view(
        -1, WEIGHTS_PER_SCALE
    )
    scales = flat.abs().amax(1, keepdim=True)
    nearest = torch.tensor(NF4_LEVELS, dtype=torch.float64)
    textbook = nearest[(flat / scales).unsqueeze(-1).sub(nearest).abs().argmin(-1)] * scales
    apart = (found.double().flatten() - textbook.flatten()[: weight.numel()]).abs()
    # The scales are rounded to 1/255 of what they range over.
    assert apart.max() <= scales.max() / 510 + (0 if dtype != torch.bfloat16 else scales.max() / 256)


def test_zeros_and_equal_weights_stay_what_they_are():
    for value in (0.0, -0.5, 3e-39):
        weight = torch.full((WEIGHTS_PER_ROW + 3,), value)
        assert torch.equal(
            dequantise(quantise(weight), (WEIGHTS_PER_ROW + 3,), torch.float32)[:WEIGHTS_PER_ROW],
            weight[:WEIGHTS_PER_ROW],
        )


@pytest.mark.first(1)
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma"])
def test_language_models_stream_in_and_learn_as_beside_the_weights_that_the_codes_stand_for(family, tmp_path):
    plain = language_model(family)
    plain.save(module := plain.build(), tmp_path, module.state_dict())
    model = dataclasses.replace(plain, name=str(tmp_path), weights=str(tmp_path), config={}, lora=LoRA(2, base="nf4"))
    runs, batch = [], collate(language_samples(5))
    torch.set_default_dtype(torch.float64)
    try:
        for base in ("nf4", "full"):
            torch.manual_seed(0)
            module = dataclasses.replace(model, lora=LoRA(2, base=base)).build().train()
            if base == "full":
                dequantised_in_place(module)
            trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
            assert set(adapters_of(module)) == trained.keys()  # and no head
            optimizer, losses = torch.optim.SGD(trained.values(), lr=0.01), []
            for _ in range(3):
                (loss,) = model.losses(module, dict(batch))
                loss.total.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.total.item())
            runs.append({"state": {name: p.detach() for name, p in trained.items()}, "losses": losses})
    finally:
        torch.set_default_dtype(torch.float32)
    assert max(difference(*runs).values()) < ROUNDING
    assert runs[0]["losses"][2] < runs[0]["losses"][0]


def test_weights_that_are_not_finite_are_refused_with_file_and_tensor(tmp_path):
    folder = Path(saved(tmp_path, "text", **MAKE["text"].keywords))
    state = load_file(folder / "model.safetensors")
    state["distilbert.transformer.layer.1.ffn.lin1.weight"][3, 5] = torch.nan
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    message = r"layer\.1\.ffn\.lin1\.weight in .*model\.safetensors has values that are not finite.*lora\.base full"
    with pytest.raises(RecipeError, match=message):
        adapted("text", str(folder)).build()


def test_the_plan_names_it_and_counts_weights_not_bytes(files):
    model = adapted("text", files["text"][0])
    assert (
        "lossy: LoRA of rank 2 on NF4 weights"
        in decide_plan(Recipe(model=model, data=Data(), batch_size=4), 1).describe()
    )
    plain = sum(parameter.numel() for parameter in MAKE["text"]().build().parameters())
    adapters = 3 * 4 * 2 * 2 * 66  # three blocks of four layers of attention
    coded, head = 3 * (4 * 66 * 66 + 2 * 66 * 131), 66 * 66 + 66 + 5 * 66 + 5
    said = f"{plain + adapters:,} parameters ({coded:,} in NF4, {adapters + head:,} trained)"
    assert str(count_weights(model.build())) == said
