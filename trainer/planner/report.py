"""What a search found: the chosen plan, all others, and why."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.planner.predict import Prediction
from trainer.recipe import Recipe
from trainer.system.text import GB, MB, as_text


@dataclass(frozen=True)
class Candidate:
    """One plan, and what is predicted for it.

    Args:
        flags: what to set, by the key of the recipe: ``{"memory.micro_batch_size": 8, ...}``. In a report, what the
            recipe says already is left out.
        plan: the plan in one line, for a person.
        allocated: predicted peak of tensors in bytes; ``None`` for a plan that was refused.
        reserved: predicted peak of what torch's allocator takes, in bytes.
        host: predicted peak of tensors in host memory, in bytes.
        step_ms: estimated milliseconds of an optimizer step.
        fits: whether it stays within the budget, with the margin.
        reason: why it was chosen, or why not.
        traced: whether the figures are of a trace; else they lie between those of two traces with other micro-batches.
        prediction: the whole prediction of a traced plan.
    """

    flags: Mapping[str, Any]
    plan: str
    allocated: int | None
    reserved: int | None
    host: int | None
    step_ms: float | None
    fits: bool
    reason: str = ""
    traced: bool = True
    prediction: Prediction | None = None

    @property
    def command(self) -> str:
        """The flags as they are typed."""
        return " ".join(f"--{key} {shlex.quote(as_text(value))}" for key, value in self.flags.items())

    def because(self, reason: str) -> Candidate:
        """The same candidate with its reason."""
        return replace(self, reason=reason)

    def to_json(self) -> dict[str, Any]:
        """In plain types, memory in GB (1e9 bytes)."""
        return {
            "flags": dict(self.flags),
            "command": self.command,
            "plan": self.plan,
            "predicted_allocated_gb": _gb(self.allocated),
            "predicted_reserved_gb": _gb(self.reserved),
            "predicted_host_gb": _gb(self.host),
            "predicted_step_ms": None if self.step_ms is None else round(self.step_ms, 2),
            "fits": self.fits,
            "reason": self.reason,
            "traced": self.traced,
        }


@dataclass(frozen=True)
class PlanReport:
    """The answer of a search.

    Args:
        recipe: that was planned for, prepared, with its budget.
        device: the GPU, or CPU, as a person calls it.
        devices: ranks.
        nodes: machines.
        budget: bytes that torch's allocator may take on each device.
        margin: part of the budget that is kept free, because predictions err.
        outside: bytes that the device needs besides: CUDA's context and NCCL's buffers.
        chosen: the fastest plan that fits; ``None`` if none does.
        candidates: all that were considered: those that fit, the fastest first; the others, the smallest first; then
            those that were refused.
        explanations: what each knob of the chosen plan bought and cost, or what is missing: a line each.
        notes: what a person must know to read the figures.
        seconds: that the search took.
    """

    recipe: Recipe
    device: str
    devices: int
    nodes: int
    budget: int
    margin: float
    outside: int
    chosen: Candidate | None
    candidates: list[Candidate]
    explanations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def smallest(self) -> Candidate | None:
        """The candidate that needs the least memory."""
        known = [one for one in self.candidates if one.reserved is not None]
        return min(known, key=lambda one: one.reserved or 0, default=None)

    @property
    def drawn(self) -> Candidate | None:
        """The candidate that ``plan.png`` shows: the chosen one, or the smallest when nothing fits."""
        return self.chosen or self.smallest

    def to_json(self) -> dict[str, Any]:
        """What ``plan.json`` holds, memory in GB (1e9 bytes)."""
        return {
            "device": self.device,
            "devices": self.devices,
            "nodes": self.nodes,
            "budget_gb": _gb(self.budget),
            "margin": self.margin,
            "outside_gb": _gb(self.outside),
            "chosen": self.chosen and self.chosen.to_json() | self._details(self.chosen),
            "candidates": [one.to_json() for one in self.candidates],
            "explanations": self.explanations,
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
        }

    def _details(self, chosen: Candidate) -> dict[str, Any]:
        return {} if chosen.prediction is None else {"prediction": chosen.prediction.to_json()}


def gigabytes(size: int) -> str:
    """For a person, finer where there is little."""
    if abs(size) < 0.01 * GB:
        return f"{size / MB:.1f} MB"
    return f"{size / GB:.2f} GB" if abs(size) >= GB else f"{size / GB:.3f} GB"


def _gb(size: int | None) -> float | None:
    return None if size is None else round(size / GB, 3)
