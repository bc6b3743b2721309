"""Out-of-memory errors: how to detect them, and the message with settings to try next."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.errors import RecipeError, RunError
from trainer.memory.knobs import KNOBS, WITH_EVALUATION
from trainer.memory.plan import Plan, decide_plan
from trainer.recipe import Recipe
from trainer.system.text import as_text, format_bytes

SIGNS = re.compile(
    r"""
    can't\ allocate\ memory |  # the host's allocator
    # runtime, driver, Triton, and NCCL, which quotes
    CUDA\ ran\ out\ of\ memory |  # cuDNN's attention, outside torch's allocator
    \b(?:CUDA|HIP)\]?:?\ (?:(?:driver\ )?error:\ |failure\ (?:\d+\ )?')?out\ of\ memory |
    \bCU[A-Z]+_STATUS\w*_ALLOC(?:ATION)?_FAILED\b |  # cuBLAS, cuDNN, ...
    CUBLAS_STATUS_NOT_INITIALIZED .* \bcublas(?:Lt)?Create  # no room for a handle
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Matches a RuntimeError of a device, one of its libraries or the host's allocator that gets no memory."""

MAX_LENGTHS = 16


class OutOfMemoryError(RunError):
    """The run needs more memory than is available. The message names the phase and the knobs that may help."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that a device or the host has no memory left."""
    said = isinstance(error, RuntimeError) and SIGNS.search(str(error)) is not None
    return said or isinstance(error, torch.OutOfMemoryError)


def describe_oom(
    error: BaseException,
    phase: str | None,
    rank: int,
    plan: Plan,
    lengths: Sequence[int] | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    recipe: Recipe | None = None,
    on_gpu: bool = True,
) -> str:
    """Describe in one line where memory ran out, the micro-batch, the plan, and what to try next.

    ``phase`` is that of the monitor, ``None`` between phases. ``lengths`` are the tokens of each sample of a text
    micro-batch; for others, its ``shapes`` are shown. Without the ``recipe`` of ``plan``, no knob is named.
    """
    parts = [f"out of memory {f'in {phase}' if phase else 'between phases'} on rank {rank}{_wanted(str(error))}"]
    if lengths:
        shown = ", ".join(map(str, lengths[:MAX_LENGTHS]))
        longest = f" ... (longest {max(lengths)})" if len(lengths) > MAX_LENGTHS else ""
        parts.append(f"micro-batch of {len(lengths)} sample{'s' * (len(lengths) > 1)} of {shown}{longest} tokens")
    elif shapes:
        named = [f"{name} {'×'.join(map(str, dims))}" for name, dims in shapes.items()]
        parts.append(f"micro-batch of {', '.join(named)}")
    parts.append(f"plan: {plan.describe()}")
    if recipe is not None:
        knobs = next_knobs(plan, recipe, phase, on_gpu)
        none_left = "no other knob can help: use more ranks, a larger device or a smaller model"
        parts.append(f"try next: {', '.join(knobs)}" if knobs else none_left)
    return "; ".join(parts)


def next_knobs(plan: Plan, recipe: Recipe, phase: str | None = None, on_gpu: bool = True) -> list[str]:
    """Return flags that may help, each by itself: the cheapest first, lossy ones last and marked.

    Leaves out flags that are set, do not help in ``phase`` (``None``: any), or conflict with the rest of ``recipe``.
    """
    found: dict[bool, list[str]] = {False: [], True: []}
    for remedy in _candidates(plan, recipe):
        if (phase is not None and phase not in remedy.phases) or (remedy.to_host and not on_gpu):
            continue
        try:
            memory = dataclasses.replace(recipe.memory, **remedy.memory)
            decided = decide_plan(recipe.replace(memory=memory, **remedy.recipe), plan.world_size)
        except RecipeError:  # cannot be combined with the rest
            continue
        if decided.memory != plan.memory or decided.initial_cut != plan.initial_cut:
            found[bool(set(decided.lossy) - set(plan.lossy))].append(remedy.flags)
    return [*found[False], *(f"{flags} (lossy)" for flags in found[True])]


def sample_lengths(batch: Any) -> list[int] | None:
    """Return the tokens of each sample of a text micro-batch on the host, without padding; otherwise ``None``."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.sum(-1).tolist() if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None


def shapes_of(batch: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a micro-batch, by key or by number."""
    if isinstance(batch, torch.Tensor):
        return {"tensor": tuple(batch.shape)}
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch if isinstance(batch, list | tuple) else ())
    return {str(key): tuple(value.shape) for key, value in items if isinstance(value, torch.Tensor)}


@dataclass(frozen=True)
class Suggestion:
    """A change to try: its flags, the settings, the phases whose peak it lowers, and whether it uses host memory."""

    flags: str
    memory: Mapping[str, Any]
    phases: Sequence[str]
    to_host: bool = False
    recipe: Mapping[str, Any] = field(default_factory=dict)


def _candidates(plan: Plan, recipe: Recipe) -> Iterator[Suggestion]:
    if plan.initial_cut.micro_batch_size > 1:  # one sample cannot be cut
        yield _smaller_micro_batches(plan, recipe)
    for knob in KNOBS:
        if knob.needs_ranks and plan.world_size == 1:
            continue
        now = getattr(recipe.memory, knob.name)
        for turn in knob.candidates:
            if turn.lowers_peak_in and now not in (turn.value, *turn.not_with):
                flag = f"--memory.{knob.name} {as_text(turn.value)}"
                yield Suggestion(flag, {knob.name: turn.value}, turn.lowers_peak_in, knob.to_host)


def _smaller_micro_batches(plan: Plan, recipe: Recipe) -> Suggestion:
    cut, most = plan.initial_cut, recipe.memory.micro_batch_tokens
    if most is not None:
        most = max(1, most // 2)
        return Suggestion(f"--memory.micro_batch_tokens {most}", {"micro_batch_tokens": most}, WITH_EVALUATION)
    if isinstance(recipe.accumulate, Mapping) and recipe.batch_size is None:  # the batch changes by epoch
        parts = next(n for n in range(2, cut.micro_batch_size + 1) if cut.micro_batch_size % n == 0)
        size, schedule = cut.micro_batch_size // parts, {epoch: n * parts for epoch, n in recipe.accumulate.items()}
        flags, changes = f"--memory.micro_batch_size {size} --accumulate '{schedule}'", {"accumulate": schedule}
        return Suggestion(flags, {"micro_batch_size": size}, WITH_EVALUATION, recipe=changes)
    size = cut.micro_batch_size // 2
    keeps = f"--batch_size {cut.batch_size} " if recipe.batch_size is None else ""
    flags, batch = f"{keeps}--memory.micro_batch_size {size}", {"batch_size": cut.batch_size, "accumulate": None}
    return Suggestion(flags, {"micro_batch_size": size}, WITH_EVALUATION, recipe=batch)


def _wanted(message: str) -> str:
    """Return the size of the allocation that failed, in brackets. The rest of torch's message is about its settings."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+ (?:[KMGT]i?B|bytes))", message)
    total = re.search(r"total capacity of ([\d.]+ [KMGT]iB)", message)
    if not found:
        return ""
    number, unit = found[1].split()
    wanted = format_bytes(float(number)) if unit == "bytes" else found[1]
    return f" ({wanted} more requested{f', the device has {total[1]}' if total else ''})"
