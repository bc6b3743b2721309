"""Losses of preferences: DPO, IPO, ORPO and SimPO, each a sum over pairs of a chosen and a rejected answer.

The formulas, their defaults and the normalization by answer length are those of TRL 1.16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainer.models.packed_attention import pack_documents
from trainer.values import IGNORED_LABEL, Loss

if TYPE_CHECKING:
    from trainer.models.causal import CausalLM

DEFAULT_BETA, DEFAULT_GAMMA = 0.1, 0.5


def packed_pairs(batch: Mapping[str, Any], packs: bool, with_prompts: bool) -> dict[str, Any]:
    """Convert a micro-batch of pairs to one of ``2 n`` texts, the chosen and the rejected one of each pair in turn.

    Args:
        batch: on the host: ``input_ids``, ``attention_mask`` and ``labels``, int64 ``(n, 2, length)``, and
            ``reference``, float64 ``(n, 2)``.
        packs: concatenate all texts in one row without padding.
        with_prompts: predict the prompts of the chosen texts, too.

    Returns:
        The inputs of the module, the bits of ``reference`` as int64, because Fabric rounds floats to half precision,
        and ``counts``, the tokens of each part. Part i is the answer of text i; 2 n + i is the prompt of pair i.
    """
    ids, mask, labels = (batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels"))
    texts = torch.arange(len(ids))
    part = torch.where(labels[:, 1:] != IGNORED_LABEL, texts[:, None], -1)
    if with_prompts:
        prompts = (part < 0) & mask[:, 1:].bool() & (texts % 2 == 0)[:, None]
        part = torch.where(prompts, len(ids) + texts[:, None] // 2, part)
    part = torch.nn.functional.pad(part, (0, 1), value=-1)  # the last token predicts nothing
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids, "part": part}
    if packs and (row := pack_documents(inputs)) is not None:
        same = (ids[::2] == ids[1::2]) & (mask[::2] * mask[1::2]).bool()
        predicts_answer = torch.nn.functional.pad(labels[:, 1:] != IGNORED_LABEL, (0, 1))
        shared = (same & ~predicts_answer[::2] & ~predicts_answer[1::2]).long().cumprod(1).sum(1)
        inputs = share_tokens(row, shared)
    part = inputs.pop("part").flatten()
    places = (part >= 0).nonzero().flatten()
    num_parts = len(ids) + len(ids) // 2 * with_prompts
    inputs |= {"places": places, "parts": part[places], "num_parts": num_parts}
    counts = part[places].bincount(minlength=num_parts)
    return {**inputs, "counts": counts, "reference": batch["reference"].view(torch.int64)}


def share_tokens(row: Mapping[str, Any], shared: Tensor) -> dict[str, Any]:
    """Keep the first ``shared`` tokens of the two texts of each pair once, in the chosen text.

    Args:
        row: all texts in one row, from ``pack_documents``.
        shared: int64 ``(n,)``, the number of equal tokens with which the texts of each pair begin.

    Returns:
        The shorter row. Attention, which still sees whole texts, computes token i of them from token ``sources[i]`` of
        the row; token i of the row is token ``kept[i]`` of the texts.
    """
    columns, lengths = row["position_ids"][0], row["cu_seq_lens"].diff().long()
    limits = torch.stack([torch.zeros_like(shared), shared], 1).flatten().repeat_interleave(lengths)
    back = torch.stack([torch.zeros_like(shared), lengths[::2]], 1).flatten().repeat_interleave(lengths)
    is_repeated = columns < limits  # only in rejected texts
    places = torch.arange(len(columns)) - back * is_repeated  # repeated tokens are in the chosen text
    kept = (~is_repeated).nonzero().flatten()
    tokens = {name: row[name][:, kept] for name in ("input_ids", "labels", "part", "position_ids")}
    return {**row, **tokens, "sources": ((~is_repeated).cumsum(0) - 1)[places], "kept": kept}


def pair_loss(model: CausalLM, module: Any, batch: Mapping[str, Any]) -> Loss:
    """Return the loss of a micro-batch from :func:`packed_pairs`, with the rewards of its pairs as ``logits``."""
    inputs = {name: value for name, value in batch.items() if name not in ("reference", "counts")}
    sums, counts, pairs = module(**inputs), batch["counts"], len(batch["reference"])
    answers = -sums[: 2 * pairs].view(pairs, 2)  # log-probabilities
    beta = DEFAULT_BETA if model.beta is None else model.beta
    if model.needs_reference:
        answers = answers - batch["reference"].view(torch.float64)
    means = answers / counts[: 2 * pairs].view(pairs, 2)
    margins = means[:, 0] - means[:, 1]
    rewards = beta * (answers if model.needs_reference else means)
    if model.loss == "dpo":
        losses = -logsigmoid(rewards[:, 0] - rewards[:, 1])
    elif model.loss == "ipo":
        losses = (margins - 1 / (2 * beta)) ** 2
    elif model.loss == "simpo":
        losses = -logsigmoid(beta * margins - (DEFAULT_GAMMA if model.gamma is None else model.gamma))
    else:
        of_others = _log1mexp(means)  # log-probabilities of other answers, per token
        whole = (sums[0 : 2 * pairs : 2] + sums[2 * pairs :]) / (counts[0 : 2 * pairs : 2] + counts[2 * pairs :])
        losses = whole - beta * logsigmoid(margins - (of_others[:, 0] - of_others[:, 1]))
    targets = torch.zeros(pairs, dtype=torch.long, device=rewards.device)  # the chosen answer is the first
    return Loss(losses.sum(), float(pairs), logits=rewards.detach(), targets=targets)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(``x``)) of negative numbers without cancellation (Mächler 2012)."""
    near = x > -math.log(2)
    return torch.where(near, (-torch.where(near, x, -1.0).expm1()).log(), (-torch.where(near, -1.0, x).exp()).log1p())
