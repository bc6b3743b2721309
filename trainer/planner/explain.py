"""Why a plan was chosen: what each knob bought and cost, or what is missing for one to fit. A line each."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.planner.knobs import Settings, turned, without_size
from trainer.planner.report import Candidate, as_text, gigabytes

SIZE, STRATEGY = "memory.micro_batch_size", "memory.strategy"

TOGETHER = {"memory.precision": ("memory.stochastic_rounding",)}
"""Knobs that are only there because of another one."""


def explain(candidates: Sequence[Candidate]) -> list[str]:
    """What was tried, and what each knob of the chosen plan bought and cost against the same plan without it.

    Args:
        candidates: with all their flags and their reasons, the chosen one first.
    """
    chosen, *others = candidates
    knobs = without_size(turned(chosen.flags))
    followers = {name for names in TOGETHER.values() for name in names}
    lines = [_tried(candidates), *_size(chosen, others)]
    lines += [line for key in knobs if key not in followers for line in _knob(key, chosen, others)]
    if not knobs:
        lines.append("no technique needs to be added: no plan that fits is faster")
    return lines


def not_fitting(
    candidates: Sequence[Candidate], budget: int, lossy: Sequence[Candidate], refused: Sequence[Candidate] = ()
) -> list[str]:
    """By how much the smallest plan misses the budget, and what would make it fit at a loss.

    Args:
        candidates: with all their flags and their reasons, the smallest first.
        budget: bytes.
        lossy: plans with settings that the recipe has not allowed.
        refused: plans that could not be predicted, with their reasons.
    """
    if not candidates:
        reasons = list(dict.fromkeys(one.reason for one in refused))
        more = f" (and {len(reasons) - 1} other reasons, which trainer plan lists)" if len(reasons) > 1 else ""
        return [f"no combination of knobs works for this recipe: {reasons[0] if reasons else 'there is none'}{more}"]
    smallest = candidates[0]
    assert smallest.reserved is not None
    lines = [
        _tried(candidates),
        f"nothing fits in {gigabytes(budget)}: the smallest plan needs {gigabytes(smallest.reserved)} "
        f"({smallest.plan}): {smallest.reason}",
    ]
    for one in lossy:
        assert one.reserved is not None
        flags = " ".join(f"--{key} {as_text(value)}" for key, value in turned(one.flags).items())
        verdict = "would fit" if one.fits else "would not fit either"
        lines.append(f"at a loss, only if you allow it: {flags}: {gigabytes(one.reserved)}, {verdict}")
    if any(one.fits for one in lossy):
        lines.append("trainer plan --lossy true finds the fastest of the plans that fit at a loss")
    return lines


def _tried(candidates: Sequence[Candidate]) -> str:
    knobs = {tuple(sorted(turned(without_size(one.flags)).items())) for one in candidates}
    sizes = {one.flags[SIZE] for one in candidates if SIZE in one.flags}
    traced, fitting = sum(one.traced for one in candidates), sum(one.fits for one in candidates)
    cut = f" with micro-batches of {' to '.join(map(str, sorted({min(sizes), max(sizes)})))}" if sizes else ""
    between = f", {len(candidates) - traced} between two traces" if traced < len(candidates) else ""
    tried = f"tried: {len(knobs)} combinations of knobs{cut}: {len(candidates)} plans, {traced} traced{between}"
    return f"{tried}; {fitting} fit"


def _size(chosen: Candidate, others: Sequence[Candidate]) -> list[str]:
    """Why the micro-batch is not larger."""
    if SIZE not in chosen.flags:
        return []
    size, knobs = chosen.flags[SIZE], without_size(turned(chosen.flags))
    larger = [one for one in others if one.flags[SIZE] > size and without_size(turned(one.flags)) == knobs]
    if not larger:
        return [f"{SIZE} {size}: there is no larger one; it is a rank's whole share of the batch"]
    one = min(larger, key=lambda one: one.flags[SIZE])
    return [f"{SIZE} {size}: with {one.flags[SIZE]} it would be {_needs(one)}: {one.reason}"]


def _knob(key: str, chosen: Candidate, others: Sequence[Candidate]) -> list[str]:
    """What the knob bought and cost."""
    wanted = _without(key, chosen)
    alike = [one for one in others if without_size(_without(key, one)) == without_size(wanted)]
    if key == STRATEGY:
        alike = [one for one in alike if one.flags[key] != chosen.flags[key]]
    else:
        alike = [one for one in alike if turned(one.flags) == _without(key, one)]
    label, instead = f"{key} {as_text(chosen.flags[key])}", "without it"
    if not alike:
        return [] if key == STRATEGY else [f"{label}: the other knobs were not tried without it"]
    if key == STRATEGY:
        instead = f"with {alike[0].flags[key]}"
    same = [one for one in alike if one.flags.get(SIZE) == chosen.flags.get(SIZE)]
    if same:
        return [f"{label}: {_difference(chosen, same[0])}; {instead}: {_needs(same[0])}, {same[0].reason}"]
    smallest = min(alike, key=lambda one: one.reserved or 0)
    return [f"{label}: {instead} even micro-batches of {smallest.flags[SIZE]} need {_needs(smallest)}"]


def _without(key: str, candidate: Candidate) -> Settings:
    """The knobs that the candidate turns, but for ``key`` and what comes with it."""
    left_out = {key, *TOGETHER.get(key, ())}
    return {name: value for name, value in turned(candidate.flags).items() if name not in left_out}


def _needs(candidate: Candidate) -> str:
    assert candidate.reserved is not None
    return f"{'' if candidate.traced else '~'}{gigabytes(candidate.reserved)}"


def _difference(one: Candidate, other: Candidate) -> str:
    """In memory of the device, time and memory of the host."""
    if None in (one.reserved, other.reserved, one.step_ms, other.step_ms, one.host, other.host):
        return "not known"
    saved, slower = other.reserved - one.reserved, 100 * (one.step_ms / other.step_ms - 1)  # type: ignore[operator]
    parts = [
        f"{gigabytes(abs(saved))} {'less' if saved >= 0 else 'more'}",
        f"{abs(slower):.0f} % {'slower' if slower >= 0 else 'faster'}",
    ]
    on_host = one.host - other.host  # type: ignore[operator]
    if abs(on_host) >= 1e7:
        parts.append(f"{gigabytes(abs(on_host))} {'more' if on_host > 0 else 'less'} on the host")
    return ", ".join(parts)
