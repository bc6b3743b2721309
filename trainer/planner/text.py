"""A plan as a person reads it: what was planned, the table, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from trainer.memory.plan import cut_at, decide_plan
from trainer.planner.gpus import GPU, nccl_bytes
from trainer.planner.knobs import applied, turned, without_size
from trainer.planner.report import Candidate, PlanReport, as_text, gigabytes
from trainer.recipe import Memory, Recipe

WIDTH, WIDEST = 112, 120
"""Of lines of text and of the table."""

LEFT = ("micro-batch", "strategy", "checkpointing", "offload", "lossy", "why")
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
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    gap = "  " if sum(widths.values()) + 2 * len(names) <= WIDEST else " "
    lines = [gap.join(_cell(name, name, widths) for name in names).rstrip()]
    lines.append(gap.join("-" * widths[name] for name in names))
    lines += [gap.join(_cell(row[name], name, widths) for name in names).rstrip() for row in rows]
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
    return "\n".join(_wrapped(lines))


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


def _wrapped(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        yield textwrap.fill(
            line, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )


def _cell(text: str, name: str, widths: dict[str, int]) -> str:
    return f"{text:<{widths[name]}}" if name in LEFT else f"{text:>{widths[name]}}"


def _row(one: Candidate, report: PlanReport) -> dict[str, str]:
    assert one.reserved is not None
    plan = decide_plan(applied(report.recipe, one.flags), report.devices)
    memory, about = plan.memory, "" if one.traced else "~"
    digits = 2 if report.budget >= 1e9 else 3
    return {
        "micro-batch": f"{plan.first_cut.accumulate} × {plan.first_cut.micro_batch_size}",
        "strategy": plan.strategy if memory.reshard_after_forward else KEPT,
        "checkpointing": as_text(memory.activation_checkpointing),
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
    precision, bits = (one.flags.get(f"memory.{name}") for name in ("precision", "optimizer_state_bits"))
    return ", ".join([str(precision).removesuffix("-true")] * bool(precision) + [f"{bits}-bit"] * bool(bits))


def _reason(one: Candidate, report: PlanReport) -> str:
    if one is report.chosen:
        return "chosen"
    if one.fits:
        fastest = report.chosen.step_ms if report.chosen is not None else None
        return f"{100 * ((one.step_ms or 0) / fastest - 1):.0f} % slower" if fastest else ""
    over = one.reserved - report.budget  # type: ignore[operator]
    return f"{gigabytes(over)} too much" if over > 0 else "in the margin"
