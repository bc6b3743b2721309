"""Text generation with transformers' ``generate``; sampled tokens do not depend on the batching of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.errors import RecipeError, require
from trainer.models.hub import max_positions
from trainer.weights.blocks import kv_cache_restored

DEFAULT_MAX_NEW_TOKENS = 128  # default maximum of generated tokens per text


def require_free_positions(batch: Mapping[str, Tensor], module: nn.Module) -> None:
    """Reject empty texts, and texts that fill all positions of the model."""
    most, length = max_positions(cast(Any, module).config.to_dict()), int(batch["attention_mask"].sum(-1).max())
    require(length > 0, "it has no tokens: give a text to continue")
    require(most is None or length < most, f"it has {length:,} tokens, and the model takes {most:,}: shorten it")


@torch.no_grad()
def generate_texts(
    module: nn.Module,  # a causal language model of transformers; its parameters define the device
    tokenizer: Any,
    batch: Mapping[str, Tensor],  # ``input_ids`` and ``attention_mask``, (n, tokens), padded on the right
    seed_indices: Sequence[int],  # positions of the texts among all inputs
    max_new_tokens: int,  # limited by the model's positions
    temperature: float = 0.0,  # divides the scores before sampling; 0 takes the most probable token
    top_p: float | None = None,  # sample from the most probable tokens with this total probability; ``None``: from all
    seed: int = 0,  # a text's samples depend on this and its position
) -> list[str]:
    """Generate the continuation of each text of ``batch``, without the text itself."""
    from transformers import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

    own, device = cast(Any, module), next(module.parameters()).device
    lengths, limit = batch["attention_mask"].sum(-1).tolist(), max_positions(own.config.to_dict())
    rooms = [max_new_tokens if limit is None else min(max_new_tokens, limit - length) for length in lengths]
    if len({*rooms}) > 1:  # a long text must not shorten the others
        found: dict[int, str] = {}
        for room in {*rooms}:
            rows = [row for row, one in enumerate(rooms) if one == room]
            part = {key: value[rows] for key, value in batch.items()}
            some = [seed_indices[row] for row in rows]
            written = generate_texts(module, tokenizer, part, some, room, temperature, top_p, seed)
            found |= zip(rows, written, strict=True)
        return [found[row] for row in range(len(rooms))]
    ids, mask = _padded_left(batch["input_ids"], batch["attention_mask"])
    ends = {*_listed(own.generation_config.eos_token_id), *_listed(tokenizer.eos_token_id)}
    # Ignore the generation settings saved with the weights, such as a repetition penalty.
    own.generation_config = GenerationConfig(
        max_new_tokens=rooms[0],
        do_sample=False,
        use_cache=True,
        eos_token_id=sorted(ends) or None,
        pad_token_id=next((one for one in (tokenizer.pad_token_id, *sorted(ends)) if one is not None), 0),
    )
    draw = LogitsProcessorList()
    if temperature:
        draw.append(TemperatureLogitsWarper(float(temperature)))
        draw += [] if top_p is None else [TopPLogitsWarper(float(top_p))]
        draw.append(cast(Any, _Noise(seed_indices, seed)))
    with kv_cache_restored(module):
        texts = own.generate(ids.to(device), attention_mask=mask.to(device), logits_processor=draw)
    new = texts[:, ids.shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class _Noise:
    """Adds Gumbel noise, with one generator per text, so that the largest score is a sample from their softmax.

    The sample is the same in any batch (Gumbel 1954; Maddison et al. 2014, A* sampling)."""

    def __init__(self, places: Sequence[int], seed: int) -> None:
        self.generators = [torch.Generator().manual_seed(seed * 1_000_003 + place) for place in places]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = [torch.empty(scores.shape[-1]).exponential_(generator=one) for one in self.generators]
        return scores.float() - torch.stack(rows).log().to(scores.device)


def _padded_left(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move the padding to the left, and cut the columns to the longest text."""
    lengths = mask.sum(-1)
    most = int(lengths.max())
    shift = (torch.arange(most) + lengths[:, None] - most) % ids.shape[1]
    return ids.gather(1, shift), mask.gather(1, shift)


def _listed(value: Any) -> list[int]:
    found = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if not all(type(one) is int for one in found):
        fix = "correct generation_config.json and config.json of the model"
        raise RecipeError(f"eos_token_id={value!r:.80} must be one or more integers: {fix}")
    return found
