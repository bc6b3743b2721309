"""The result of a search, as text and as JSON: the chosen plan, all other plans, and the reasons."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from trainer.fakegpu.peaks import Retries
from trainer.fakegpu.prediction import Prediction
from trainer.memory.knobs import LOSSLESS_PLANNED, LOSSY
from trainer.memory.plan import Plan, decide_plan
from trainer.planner.knobs import UNSET_VALUES, Settings, apply_settings, non_default_settings, without_size
from trainer.recipe import Memory, Recipe
from trainer.system.text import GB, WIDTH, align_columns, as_text, format_bytes, wrapped

OWN = {knob.column: knob.name for knob in LOSSLESS_PLANNED if knob.column}
LEFT = ("micro-batch", "strategy", *OWN, "offload", "lossy", "why")  # columns of text
RESERVED, ON_HOST, TIME = "reserved", "on the host", "ms per step"
SIGNS = {
    "*": "keeps whole weights until backward: memory.reshard_after_forward false",
    "+": "sums gradients over the ranks in every micro-step: memory.sync_every_micro_step true",
    "after": "retries: more than the budget would be reserved, so torch must release its cache",
    "expandable": "memory.expandable_segments true: torch's allocator leaves fewer gaps",
    "hsdp": "keeps a replica of the sharded model on each machine: memory.replicas",
}
SIZE = "memory.micro_batch_size"
RETRIES_PAY = 0.03  # share by which allocator retries must shorten a step: how often they recur is not known
NOTHING = ("no plan fits", "no combination of knobs works", "the model cannot be traced")  # how explanations begin


@dataclass(frozen=True)
class Candidate:
    """One plan with its predicted values, which are ``None`` if it was rejected. Memory is in bytes."""

    flags: Mapping[str, Any]  # settings by recipe key; in a report only those that differ from the recipe
    plan: str  # description in one line
    allocated: int | None = None  # peak of tensors
    reserved: int | None = None  # peak of the memory that torch's allocator takes
    host: int | None = None  # peak of tensors in host memory
    step_ms: float | None = None  # estimated milliseconds of an optimizer step
    fits: bool = False  # whether ``reserved`` stays within the budget, with the margin
    reason: str = ""  # why it was chosen, or why not
    traced: bool = True  # else interpolated between traces with other micro-batches
    prediction: Prediction | None = None  # the whole prediction of a traced plan

    @property
    def command(self) -> str:
        return " ".join(f"--{key} {shlex.quote(as_text(value))}" for key, value in self.flags.items())

    @property
    def knobs(self) -> Settings:
        """The knobs that differ from their defaults, without the micro-batch."""
        return without_size(non_default_settings(self.flags))

    @property
    def retries(self) -> int | None:
        """The number of times that torch must release its cache to stay within the budget; ``None`` if it cannot."""
        return self.prediction.retries if self.prediction is not None else 0 if self.fits else None

    @property
    def rank_ms(self) -> float:
        """The milliseconds by which plans are compared: more with retries, infinite if it cannot run."""
        return inf if self.retries is None else (self.step_ms or 0.0) * (1 + RETRIES_PAY * (self.retries > 0))

    def slowdown_text(self, fastest: Candidate) -> str:
        """Compare with the ``fastest`` plan, such as ``5 % slower``."""
        return f"{max(0.0, 100 * ((self.step_ms or 0.0) / (fastest.step_ms or 1.0) - 1)):.0f} % slower"

    def to_json(self) -> dict[str, Any]:
        """Return plain types, with memory in GB (1e9 bytes)."""
        return {
            "flags": dict(self.flags),
            "command": self.command,
            "plan": self.plan,
            **{f"predicted_{name}_gb": _gb(getattr(self, name)) for name in ("allocated", "reserved", "host")},
            "predicted_step_ms": None if self.step_ms is None else round(self.step_ms, 2),
            **{name: getattr(self, name) for name in ("fits", "retries", "reason", "traced")},
        }


@dataclass(frozen=True)
class PlanReport:
    """The result of a search."""

    recipe: Recipe  # the prepared recipe, with its budget
    device: str  # display name of the GPU or CPU
    devices: int  # ranks
    nodes: int  # machines
    budget: int  # bytes that torch's allocator may take on each device
    margin: float  # part of the budget that is kept free, because predictions err
    outside: int  # bytes needed in addition: the CUDA context and NCCL's buffers
    chosen: Candidate | None  # the fastest plan that fits; ``None`` if none does
    candidates: list[Candidate]  # those that fit, fastest first; the others, smallest first; then the rejected
    explanations: list[str] = field(default_factory=list)  # lines: what was tried, or why no plan fits
    notes: list[str] = field(default_factory=list)  # how to read the values
    seconds: float = 0.0  # duration of the search
    interconnect: str | None = None  # set if it was given, or if there are several nodes

    @property
    def smallest(self) -> Candidate | None:
        known = [one for one in self.candidates if one.reserved is not None]
        return min(known, key=lambda one: one.reserved or 0, default=None)

    @property
    def drawn(self) -> Candidate | None:
        """The candidate whose memory ``plan.html`` draws: the chosen one, or the smallest if nothing fits."""
        return self.chosen or self.smallest

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``plan.json``, with memory in GB (1e9 bytes)."""
        chosen = self.chosen
        whole = {} if chosen is None or chosen.prediction is None else {"prediction": chosen.prediction.to_json()}
        return {
            **{name: getattr(self, name) for name in ("device", "devices", "nodes", "interconnect")},
            "budget_gb": _gb(self.budget),
            "margin": self.margin,
            "outside_gb": _gb(self.outside),
            "chosen": chosen and chosen.to_json() | whole,
            "candidates": [one.to_json() for one in self.candidates],
            "explanations": self.explanations,
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
        }


def _gb(size: int | None) -> float | None:
    return None if size is None else round(size / GB, 3)


def table(report: PlanReport) -> str:
    """Format the chosen plan, then the best of each combination of knobs: the fastest that fits, else the smallest."""
    rows = [_row(one, report) for one in best_of_each(report.candidates)]
    if not rows:
        return "(no plan could be predicted)"
    names = [name for name in rows[0] if any(row[name] not in ("", "false") for row in rows)]
    lines = [align_columns(names, [[row[name] for name in names] for row in rows], LEFT)]
    if any("~" in row[RESERVED] for row in rows):
        lines.append("~ interpolated between the traces of a smaller and a larger micro-batch")
    shown = "".join(row["strategy"] + row["fits"] for row in rows)
    lines += [f"{sign} {words}" for sign, words in SIGNS.items() if sign in shown]
    return "\n".join(lines)


def best_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the first candidate of each combination of knobs, without the rejected ones."""
    found: dict[object, Candidate] = {}
    for one in candidates:
        if one.reserved is not None:
            found.setdefault(tuple(sorted(one.knobs.items())), one)
    return list(found.values())


def explanation_text(report: PlanReport) -> str:
    """Format the explanations, the rejected plans and the notes."""
    refused: dict[str, list[Candidate]] = {}
    for one in report.candidates:
        if one.reserved is None:
            refused.setdefault(one.reason, []).append(one)
    lines = [*report.explanations]
    if report.drawn and report.drawn.prediction and (kernels := report.drawn.prediction.attention):
        keeps = "; math keeps one value per pair of tokens and head" if "math" in " ".join(kernels) else ""
        lines.append(f"attention kernels of the first plan: {', '.join(kernels)}{keeps}")
    for reason, ones in refused.items():
        example = ones[0].command or "the recipe unchanged"
        lines.append(f"rejected: {len(ones)} of the plans (such as {example}): {reason}")
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(wrapped(f"- {line}", "  ") for line in lines)


def settings(report: PlanReport) -> str:
    """Format the chosen plan as a table of its settings, for use with another trainer."""
    assert report.chosen is not None
    recipe = apply_settings(report.recipe, report.chosen.flags)
    plan = decide_plan(recipe, report.devices)
    rows = [
        ("samples per micro-batch", plan.initial_cut.micro_batch_size),
        ("micro-batches per step and rank", plan.initial_cut.accumulate),
        ("ranks", f"{report.devices}, {plan.strategy}"),
        ("precision", plan.memory.precision),
        ("optimizer", recipe.optim.kind),
        *((f"memory.{name}", as_text(getattr(plan.memory, name))) for name in UNSET_VALUES if name != "strategy"),
        ("memory.expandable_segments", as_text(plan.memory.expandable_segments)),
    ]
    return align_columns(["knob", "value"], [[name, str(value)] for name, value in rows], ("knob", "value"))


def wrap_command(words: Sequence[str]) -> str:
    """Wrap a command for pasting into a shell, without splitting any of ``words``, such as a flag with its value."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def _row(one: Candidate, report: PlanReport) -> dict[str, str]:
    recipe = apply_settings(report.recipe, one.flags)
    plan = decide_plan(recipe, report.devices)
    memory, about = plan.memory, "" if one.traced else "~"
    return {
        "micro-batch": f"{plan.initial_cut.accumulate} × {plan.initial_cut.micro_batch_size}",
        "strategy": _strategy(plan, recipe.memory),
        **{column: as_text(getattr(memory, name)) for column, name in OWN.items()},
        "offload": _offload(memory),
        "lossy": _lossy(one),
        RESERVED: about + format_bytes(one.reserved or 0),
        ON_HOST: about + format_bytes(one.host or 0),
        TIME: f"{about}{one.step_ms or 0:,.1f}",
        "fits": Retries(one.retries).cell + (", expandable" if memory.expandable_segments else ""),
        "why": _reason(one, report),
    }


def _strategy(plan: Plan, wanted: Memory) -> str:
    name = "hsdp" if plan.memory.replicas > 1 else plan.strategy
    synced = "+" if wanted.sync_every_micro_step else ""  # an offload syncs anyway
    return name + ("" if plan.memory.reshard_after_forward else "*") + synced


def _offload(memory: Memory) -> str:
    if not memory.activation_offload:
        return memory.cpu_offload
    return "activations" if memory.cpu_offload == "none" else f"{memory.cpu_offload}, act."


def _lossy(one: Candidate) -> str:
    values = {knob.column: one.flags.get(f"memory.{knob.name}") for knob in LOSSY}
    return ", ".join(column.format(str(now).removesuffix("-true")) for column, now in values.items() if now is not None)


def _reason(one: Candidate, report: PlanReport) -> str:
    if one is report.chosen:
        return "chosen"
    if one.retries is not None and report.chosen is not None:
        return one.slowdown_text(report.chosen)
    over = (one.reserved or 0) - report.budget
    return f"{format_bytes(over)} too much" if over > 0 else "in the margin"


def values_text(one: Candidate) -> str:
    """Describe a plan with its time and its memory."""
    return f"{one.plan}: {one.step_ms:,.1f} ms per step, {format_bytes(one.reserved or 0)}"


def explain_choice(candidates: Sequence[Candidate], combinations: tuple[int, int]) -> list[str]:
    """Explain the first candidate and the next faster plan; ``combinations`` counts possible and rejected ones."""
    chosen = candidates[0]
    lines = _tried(candidates, combinations)
    time = chosen.step_ms or 0.0
    calm = next((one for one in candidates if one.fits and one.traced), None)
    if chosen.retries:
        other = f"{100 * RETRIES_PAY:g} % slower or less"
        if calm is not None:
            other += f"; the fastest that was traced is {values_text(calm)}, {calm.slowdown_text(chosen)}"
        lines.append(f"the chosen plan {Retries(chosen.retries)}: no plan that fits without retries is {other}")
    faster = [one for one in candidates if one.traced and one.rank_ms == inf and (one.step_ms or 0.0) < time]
    if faster:
        next_one = max(faster, key=lambda one: one.step_ms or 0.0)
        lines.append(f"the next faster plan does not fit: {values_text(next_one)}, {next_one.reason}")
    elif not chosen.knobs:
        lines.append("no memory technique is needed beyond what the recipe sets: the plan without more is the fastest")
    return lines + [knob.note for knob in LOSSLESS_PLANNED if knob.note and chosen.flags.get(f"memory.{knob.name}")]


def explain_no_fit(
    candidates: Sequence[Candidate],
    combinations: tuple[int, int],
    budget: int,
    lossy: Sequence[Candidate],
    refused: Sequence[Candidate] = (),
) -> list[str]:
    """Explain by how much the smallest plan, the first, misses the budget, and which ``lossy`` plans would fit."""
    if not candidates:
        reasons = list(dict.fromkeys(one.reason for one in refused))
        more = f" (and {len(reasons) - 1} other reasons, which trainer plan lists)" if len(reasons) > 1 else ""
        return [f"no combination of knobs works for this recipe: {reasons[0] if reasons else 'none is valid'}{more}"]
    smallest = candidates[0]
    least = f"the smallest needs {format_bytes(smallest.reserved or 0)} ({smallest.plan}): {smallest.reason}"
    lines = [*_tried(candidates, combinations), f"no plan fits in {format_bytes(budget)}: {least}"]
    for one in lossy:
        flags = " ".join(f"--{key} {as_text(value)}" for key, value in non_default_settings(one.flags).items())
        verdict = "not fit either" if one.retries is None else str(Retries(one.retries)).replace("fits", "fit")
        lines.append(f"lossy, must be enabled explicitly: {flags}: {format_bytes(one.reserved or 0)}, would {verdict}")
    if any(one.rank_ms < inf for one in lossy):
        lines.append("trainer plan --lossy true also considers lossy plans and finds the fastest that fits")
    return lines


def explain_too_small(plan: Plan, parts: Mapping[str, int], budget: int) -> list[str]:
    """Explain that no plan can fit, because of the ``parts`` that even the smallest, ``plan``, needs."""
    needs, total = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items()), sum(parts.values())
    given = format_bytes(budget) if budget >= GB / 1e4 else f"{budget:,} bytes"
    least = f"a rank needs more than {format_bytes(total)}, even without activations: {needs} ({plan.describe()})"
    return [f"no plan fits in {given}: {least}", "nothing was traced, because the weights alone need more"]


def _tried(candidates: Sequence[Candidate], combinations: tuple[int, int]) -> list[str]:
    possible, refused = combinations
    sizes = {one.flags[SIZE] for one in candidates if SIZE in one.flags}
    traced, fitting = sum(one.traced for one in candidates), sum(one.fits for one in candidates)
    cut = f" with micro-batches of {' to '.join(map(str, sorted({min(sizes), max(sizes)})))}" if sizes else ""
    plans = f"{len(candidates)} plan{'s' if len(candidates) > 1 else ''}, {traced} traced"
    plans += f", {len(candidates) - traced} interpolated" if traced < len(candidates) else ""
    retried = sum(bool(one.retries) for one in candidates)
    plans += f"; {fitting} fit" + (f", {retried} more only after allocator retries" if retried else "")
    plans += f"; {refused} other combinations were rejected" if refused else ""
    tried = len(best_of_each(candidates))
    lines = [f"tried: {tried} of {possible} combinations of knobs{cut}: {plans}"]
    if tried < possible:
        cannot = "cannot be faster or cannot fit" if fitting or retried else "cannot need less memory"
        lines.append(f"not tried: the other combinations, which {cannot}; trainer plan --all tries more of them")
    return lines
