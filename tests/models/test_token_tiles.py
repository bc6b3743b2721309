"""MLPs and norms in tiles of tokens: the gradients are those of whole rows, on any split and number of ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.language import language_model, language_samples
from helpers.matrix import ADAMW, Case, difference, perturbed, stacked_run
from helpers.rounding import ROUNDING
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainer import RecipeError
from trainer.contract import Model
from trainer.models import CausalLM, LoRA, token_tiles
from trainer.models.token_tiles import CERTIFIED, MIN_TILED_TOKENS, TILES, num_tiles, use_tiles
from trainer.recipe import Memory

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
TILE = 5  # tokens: no length of a row is a multiple


def plain_transformer(kind: str) -> Any:
    config = AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else SIZES))
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return perturbed(AutoModelForCausalLM.from_config(config))
    finally:
        torch.set_default_dtype(torch.float32)


def gradients(module: Any) -> dict[str, Tensor]:
    module.zero_grad()
    ids = torch.arange(42).reshape(2, 21).remainder(40) + 1
    module(input_ids=ids, use_cache=False).logits.square().sum().backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - one).abs().max() / one.abs().max()) for name, one in expected.items())


@pytest.mark.parametrize("kind", CERTIFIED)
def test_certified_architectures_have_the_gradients_of_plain_transformers(kind):
    expected, module = gradients(plain_transformer(kind)), plain_transformer(kind)
    use_tiles(module, TILE)
    tiled = [type(part).__name__ for part in module.modules() if hasattr(part, "tile_tokens")]
    assert sum(name.endswith("MLP") for name in tiled) == 2  # one per block
    assert len(tiled) >= 7  # and its norms, and the last one
    assert largest_error(gradients(module), expected) < 100 * ROUNDING


def drop_last_tile(monkeypatch):
    monkeypatch.setattr(torch, "cat", lambda parts: torch._C._VariableFunctions.cat([*parts[:-1], 0 * parts[-1]]))


def detach_all_but_last(monkeypatch):
    def last_only(parts):
        return torch._C._VariableFunctions.cat([*(part.detach() for part in parts[:-1]), parts[-1]])

    monkeypatch.setattr(torch, "cat", last_only)


@pytest.mark.parametrize("plant", [drop_last_tile, detach_all_but_last])
def test_a_planted_fault_is_found(plant, monkeypatch):
    expected, module = gradients(plain_transformer("gpt2")), plain_transformer("gpt2")
    use_tiles(module, TILE)
    plant(monkeypatch)  # GPT-2 itself concatenates nothing
    assert largest_error(gradients(module), expected) > 1e-3


@dataclasses.dataclass(frozen=True)
class Tiled(Case):
    """A language model on 17 ragged samples, as in test_causal_equality.py.

    Args:
        tile: ``model.tile_tokens``.
        rank: of adapters, on attention and MLP; 0 trains the weights.
        free: ``model.padding_free``.
        base: ``model.lora.base``.
    """

    size: int = 17
    tile: int = 0
    rank: int = 0
    free: bool | None = None
    base: str = "full"

    @property
    def model(self) -> Model:
        targets = ["q_proj", "down_proj", "up_proj"] if self.rank else None
        lora = LoRA(self.rank, targets=targets, base=self.base)  # type: ignore[arg-type]
        return language_model(self.name, tile_tokens=self.tile, padding_free=self.free, lora=lora)

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        return language_samples(self.size)


def steps(ranks: Any, name: str, place: Any, size: int, memory: Any = (), **options: Any) -> Any:
    memory = {"precision": "64-true", "strategy": place[0], "micro_batch_size": size, **dict(memory)}
    case = Tiled(name, Memory(**memory), place[1], optim=ADAMW, **options)
    return stacked_run(case) if place[1] == 1 else ranks(place[1]).run(stacked_run, case)[0]


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


FULL, SOME = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
OFFLOADED = {**FULL, "activation_offload": True}
FEW = [("llama", ("fsdp", 2), 3, 2, None, FULL)]
MANY = [
    *[("gpt2", ("ddp", 2), 1, 0, None, {}), ("gpt2", ("fsdp", 2), 3, 0, False, FULL)],
    *[("qwen3", ("auto", 1), 3, 0, None, SOME), ("qwen3", ("fsdp", 2), 8, 2, False, OFFLOADED)],
    *[("llama", ("ddp", 2), 3, 2, None, FULL), ("llama", ("fsdp", 2), 1, 0, None, {"cpu_offload": "parameters"})],
    *[("llama", ("fsdp", 3), 3, 0, None, FULL), ("qwen3", ("ddp", 2), 3, 0, None, {"cpu_offload": "optimizer"})],
]


@pytest.mark.parametrize(
    ("name", "place", "size", "rank", "free", "memory"),
    [*FEW, *(slow(*one) for one in MANY)],
)
def test_steps_are_those_without_tiles_on_one_rank(name, place, size, rank, free, memory, ranks):
    expected = steps(ranks, name, ("auto", 1), 8, rank=rank)
    found = steps(ranks, name, place, size, memory, tile=TILE, rank=rank, free=free)
    assert max(difference(found, expected).values()) <= ROUNDING


SPLIT, NF4 = {"tensor_parallel": 2}, {"rank": 2, "base": "nf4"}
FEW_TILES = {"tile": 40, "free": False}  # every other number of tiles is compiled again
ALSO = [
    ("llama", ("ddp", 2), SPLIT, {}),
    ("llama", ("auto", 1), {}, NF4),
    *[slow("qwen3", ("fsdp", 2), {**SPLIT, **FULL}, {"free": False}), slow("qwen3", ("ddp", 2), {**SPLIT, **SOME}, {})],
    slow("llama", ("ddp", 2), {**SPLIT, "sequence_parallel": True}, {}),
    slow("qwen3", ("fsdp", 2), FULL, {**NF4, "free": False}),
    *[
        slow("llama", ("auto", 1), {"compile": "blocks"}, {"tile": 40}),
        slow("gpt2", ("auto", 1), {"compile": "blocks"}, FEW_TILES),
    ],
    slow("gpt2", ("auto", 1), {"compile": "blocks", **FULL}, FEW_TILES),
    slow("gpt2", ("auto", 1), {"compile": "model"}, {"tile": 160, "free": False}),
]


@pytest.mark.parametrize(("name", "place", "memory", "options"), ALSO)
def test_tiles_go_with_tensor_parallelism_compilation_and_nf4(name, place, memory, options, ranks):
    lora = {key: options[key] for key in options.keys() & NF4.keys()}
    expected = steps(ranks, name, ("auto", 1), 8, **lora)
    found = steps(ranks, name, place, 8, memory, **{"tile": TILE, **options})
    assert max(difference(found, expected).values()) <= ROUNDING


def test_only_long_micro_batches_have_tiles_by_default():
    assert num_tiles(MIN_TILED_TOKENS - 1, None) == 1
    assert num_tiles(MIN_TILED_TOKENS, None) == num_tiles(10 * MIN_TILED_TOKENS, None) == TILES
    assert [num_tiles(10, size) for size in (1, 3, 10, 11)] == [10, 4, 1, 1]
    module = language_model("llama", tile_tokens=0).build()
    assert not any(hasattr(part, "tile_tokens") for part in module.modules())


def test_tiles_save_their_inputs_instead_of_the_intermediate_values_of_mlps():
    found, width, ids = [], SIZES["intermediate_size"], torch.arange(42).reshape(2, 21)
    for size in (0, TILE):
        use_tiles(module := plain_transformer("llama"), size)
        weights, saved = {p.data_ptr() for p in module.parameters()}, []

        def keep(tensor: Tensor, weights: Any = weights, saved: Any = saved) -> Tensor:
            saved += [tensor.numel()] if tensor.shape[-1] == width and tensor.data_ptr() not in weights else []
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module(input_ids=ids, use_cache=False)
        found.append(sum(saved))
    assert found[0] >= 2 * 3 * ids.numel() * width  # of two blocks
    assert found[1] == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CausalLM("llama", tile_tokens=-1), r"model\.tile_tokens=-1 must be a number of tokens, 0 for all"),
        (lambda: language_model("gemma3", tile_tokens=8).build(), r"tile_tokens=8 is not certified for gemma3_text"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(RecipeError, match=message):
        make()
    assert isinstance(language_model("gemma3").build(), nn.Module)
    assert "gemma3_text" not in token_tiles.CERTIFIED
