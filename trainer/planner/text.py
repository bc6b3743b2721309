"""A plan as a person reads it: what was planned, the table, and why."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.engine.window import cut_at
from trainer.memory.knobs import FOLLOWERS, LOSSY, SEARCHED, TOGETHER
from trainer.memory.plan import decide_plan
from trainer.planner.gpus import GPU, nccl_bytes
from trainer.planner.knobs import Settings, applied, turned, without_size
from trainer.planner.report import Candidate, PlanReport
from trainer.recipe import Memory, Recipe
from trainer.system.text import WIDTH, as_text, columns, gigabytes, wrapped

OWN = {knob.column: knob.name for knob in SEARCHED if knob.column}
LEFT = ("micro-batch", "strategy", *OWN, "offload", "lossy", "why")
"""Columns of words; figures are on the right."""


GIGABYTES, ON_HOST, TIME = "GB reserved", "host GB", "ms a step"

KEPT = "fsdp*"


def heading(
    recipe: Recipe, gpu: GPU, devices: int, nodes: int, budget: int, margin: float, parameters: tuple[int, int]
) -> str:
    """What is going to be planned.

    Args:
        recipe: prepared, with a budget.
        gpu: of every rank.
        devices: ranks, over all nodes.
        nodes: machines.
        budget: bytes that torch's allocator may take.
        margin: part of it that is kept free.
        parameters: of the model, and how many of them are trained.
    """
    count, trained = parameters
    frozen = f" ({trained:,} trained)" if trained < count else ""
    where = f" on {nodes} machines" if nodes > 1 else ""
    rows = [
        ("model", f"{type(recipe.model).__name__}: {count:,} parameters{frozen}"),
        ("batch", f"{cut_at(recipe, devices, 0).batch_size:,} samples a step, {recipe.memory.precision}"),
        ("devices", f"{devices} × {gpu.title} of {gigabytes(gpu.memory)}{where}"),
        ("budget", f"{gigabytes(budget)} on each device for torch, of which {100 * margin:g} % are to stay free"),
    ]
    if gpu.context:
        nccl = f" and {gigabytes(nccl_bytes(devices))} for NCCL" if devices > 1 else ""
        rows.append(("outside", f"on top, about {gigabytes(gpu.context)} for the CUDA context{nccl}"))
    if gpu.note:
        rows.append(("note", gpu.note))
    return "\n".join(f"{label:<8} {text}" for label, text in rows)


def table(report: PlanReport) -> str:
    """The chosen plan, then the best of each combination of knobs: the fastest that fits, or else the smallest."""
    rows = [_row(one, report) for one in best_of_each(report)]
    if not rows:
        return "(no plan could be predicted)"
    names = [name for name in rows[0] if name != "lossy" or any(row["lossy"] for row in rows)]
    lines = [columns(names, [[row[name] for name in names] for row in rows], LEFT)]
    if any("~" in row[GIGABYTES] for row in rows):
        lines.append("~ lies between the traces of a smaller and a larger micro-batch")
    if any(KEPT in row["strategy"] for row in rows):
        lines.append(f"{KEPT} keeps whole weights until backward: memory.reshard_after_forward false")
    return "\n".join(lines)


def best_of_each(report: PlanReport) -> list[Candidate]:
    """One candidate for each combination of knobs, in the report's order; those that were refused are left out."""
    found: dict[object, Candidate] = {}
    for one in report.candidates:
        if one.reserved is not None:
            found.setdefault(tuple(sorted(turned(without_size(one.flags)).items())), one)
    return list(found.values())


def why(report: PlanReport) -> str:
    """The explanations, what was refused, and notes."""
    refused: dict[str, list[Candidate]] = {}
    for one in report.candidates:
        if one.reserved is None:
            refused.setdefault(one.reason, []).append(one)
    lines = [*report.explanations]
    for reason, ones in refused.items():
        example = ones[0].command or "the recipe as it is"
        lines.append(f"refused, {len(ones)} of the plans (such as {example}): {reason}")
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(wrapped(f"- {line}", "  ") for line in lines)


def pasteable(words: Sequence[str]) -> str:
    """A command on as few lines as fit, to paste.

    Args:
        words: what stays together, such as a flag with its value.
    """
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def _row(one: Candidate, report: PlanReport) -> dict[str, str]:
    assert one.reserved is not None
    plan = decide_plan(applied(report.recipe, one.flags), report.devices)
    memory, about = plan.memory, "" if one.traced else "~"
    digits = 2 if report.budget >= 1e9 else 3
    return {
        "micro-batch": f"{plan.first_cut.accumulate} × {plan.first_cut.micro_batch_size}",
        "strategy": plan.strategy if memory.reshard_after_forward else KEPT,
        **{column: as_text(getattr(memory, name)) for column, name in OWN.items()},
        "offload": _offload(memory),
        "lossy": _lossy(one),
        GIGABYTES: f"{about}{one.reserved / 1e9:.{digits}f}",
        ON_HOST: f"{about}{(one.host or 0) / 1e9:.{digits}f}",
        TIME: f"{about}{one.step_ms or 0:,.1f}",
        "fits": "yes" if one.fits else "no",
        "why": _reason(one, report),
    }


def _offload(memory: Memory) -> str:
    if not memory.activation_offload:
        return memory.cpu_offload
    return "activations" if memory.cpu_offload == "none" else f"{memory.cpu_offload}, act."


def _lossy(one: Candidate) -> str:
    """What a search with lossy plans has changed."""
    values = {knob.column: one.flags.get(f"memory.{knob.name}") for knob in LOSSY}
    return ", ".join(column.format(str(now).removesuffix("-true")) for column, now in values.items() if now is not None)


def _reason(one: Candidate, report: PlanReport) -> str:
    if one is report.chosen:
        return "chosen"
    if one.fits:
        fastest = report.chosen.step_ms if report.chosen is not None else None
        return f"{100 * ((one.step_ms or 0) / fastest - 1):.0f} % slower" if fastest else ""
    over = one.reserved - report.budget  # type: ignore[operator]
    return f"{gigabytes(over)} too much" if over > 0 else "in the margin"


# Why a plan was chosen: what each knob bought and cost, or what is missing for one to fit. A line each.

SIZE, STRATEGY = "memory.micro_batch_size", "memory.strategy"


def explain(candidates: Sequence[Candidate]) -> list[str]:
    """What was tried, and what each knob of the chosen plan bought and cost against the same plan without it.

    Args:
        candidates: with all their flags and their reasons, the chosen one first.
    """
    chosen, *others = candidates
    knobs = without_size(turned(chosen.flags))
    lines = [_tried(candidates), *_size(chosen, others)]
    lines += [line for key in knobs if key not in FOLLOWERS for line in _knob(key, chosen, others)]
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
