"""What a row of ``gpu.py`` measured, and whether it is what was asked of it: memory, losses and gradients."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import table
from gpu_rows import Row
from safetensors.numpy import load_file

from trainer.lab.measured_run import Trial

Found = dict[str, Any]

NOT_RUN, LATE = "not run", "late"
"""A row that was not begun, and one that has not taken a whole step: it may have been cut after that."""
MET = {True: "yes", False: "no", None: "–"}
EPOCH = 50_000
"""Images of CIFAR-10's training set: the published minutes are those of one epoch."""
LAST = 20
"""Steps whose median time counts."""
SMALL = 1e-3
"""Of the whole gradient's norm: a smaller one (of a key's bias, which no loss depends on) is measured against this."""
HALF = {"bf16-mixed": "bfloat16", "16-mixed": "float16", "bf16-true": "bfloat16", "16-true": "float16"}


LIMITS = {
    "32-true": {"loss": 1e-3, "norm": 1e-3, "tensor": 1e-3},
    "bf16-mixed": {"loss": 1e-2, "norm": 4e-3, "tensor": 3e-2},
}
"""The largest relative differences that rounding may make, by precision; rows of others are not compared.

Of the loss of a step; of the norm of the first step's gradient; and of the gradient of one tensor: the norm of its
difference from the other over the other's.

In a ViT of 24 layers (width 128, on a CPU) rounding to bf16 moved the norm by 4e-4, and the gradient of a weight by
9e-3 in the median and 1.4e-2 at most. One of 32 samples left out moved them by 1.8e-2 and 1e-1, of 64 by about 9e-3 and
7e-2: the limits lie between.
"""


@dataclass
class Measured:
    """What came of a row.

    Args:
        row: what was asked for.
        trial: how the process ended.
        found: what ``measured_run.py`` wrote.
        gradients: the file of the first step's, which may not be there.
    """

    row: Row
    trial: Trial
    found: Mapping[str, Any] = field(default_factory=dict)
    gradients: Path | None = None


def compare(ours: Measured, other: Measured) -> dict[str, Any]:
    """How far losses and the gradients of the first step are from those of ``other``, and whether that is rounding."""
    limits = LIMITS[ours.found["precision"]]
    pairs = list(zip(ours.trial.losses, other.trial.losses, strict=False))  # of as many steps as both have
    found: dict[str, Any] = {
        "loss": max((_apart(own, theirs) for own, theirs in pairs), default=None),
        "norm": _apart(ours.found.get("grad_norm"), other.found.get("grad_norm")),
        **_worst_norm(ours.found.get("grad_norms", {}), other.found.get("grad_norms", {})),
        "tensors": _tensors(ours, other),
    }
    found["reference"] = other.row.name
    if None in (found["loss"], found["norm"], found["worst_norm"]) or not found["tensors"]:
        known = [one.found.get("gradient_problem") for one in (ours, other)]
        problem = next(filter(None, known), "a run has none of its first step")
        return found | {"wrong": [f"gradients were not compared: {problem}"]}
    held = [
        ("the loss", found["loss"], limits["loss"]),
        ("the gradient's norm", found["norm"], limits["norm"]),
        (f"the norm of the gradient of {found['worst']}", found["worst_norm"], limits["tensor"]),
        *((f"the gradient of {name}", value, limits["tensor"]) for name, value in found["tensors"].items()),
    ]
    # Not a number is wrong, too.
    wrong = [f"{what} differs by {value:.1e}, more than {limit:g}" for what, value, limit in held if not value <= limit]
    return found | {"wrong": wrong}


def _apart(own: float | None, theirs: float | None) -> float | None:
    if own is None or theirs is None:
        return None
    return abs(own - theirs) / abs(theirs) if theirs else math.inf


def _worst_norm(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, Any]:
    """The weight whose gradient's norm is farthest from the other's; one that is missing is infinitely far."""
    least = SMALL * math.hypot(*theirs.values())
    apart = {
        name: abs(ours[name] - theirs[name]) / max(theirs[name], least) if name in ours and name in theirs else math.inf
        for name in ours.keys() | theirs.keys()
    }
    apart = {name: value if value == value else math.inf for name, value in apart.items()}
    worst = max(apart, key=lambda name: apart[name], default=None)
    return {"worst": worst, "worst_norm": None if worst is None else apart[worst]}


def _tensors(ours: Measured, other: Measured) -> dict[str, float]:
    """The relative difference of each gradient that both have kept."""
    if ours.gradients is None or other.gradients is None:
        return {}
    own, theirs = load_file(ours.gradients), load_file(other.gradients)
    least = SMALL * other.found.get("grad_norm", 0.0)
    return {
        name: float(np.linalg.norm(own[name] - theirs[name]) / max(float(np.linalg.norm(theirs[name])), least))
        for name in sorted(own.keys() & theirs.keys())
    }


def judge(one: Measured, others: Sequence[Measured], peaks: Mapping[str, float]) -> dict[str, Any]:
    """What is written about a row: the figures, the target, and whether all that was asked of it is met.

    Args:
        one: the row.
        others: all rows so far.
        peaks: the GPU's dense operations a second, by type.
    """
    row, trial, found = one.row, one.trial, one.found
    reference = next((other for other in others if other.row.name == row.reference), None)
    compared = None
    if reference is not None and found.get("precision") in LIMITS and reference.trial.losses and trial.losses:
        compared = compare(one, reference)
    result = {
        "name": row.name,
        **trial.to_json(),
        "status": LATE if trial.status == "too slow" or found.get("cut_at") == 1 else trial.status,
        "cut_at": found.get("cut_at"),
        "allocated_gb": trial.memory.get("allocated_gb"),
        "reserved_gb": trial.memory.get("reserved_gb"),
        "process_gb": found.get("process_gb"),
        "process_from": found.get("process_from"),
        **_speed(row, found, peaks),
        "copied": found.get("copied"),
        "grad_norm": found.get("grad_norm"),
        "difference": compared,
        "cap_gb": row.cap_gb,
        "environment": dict(row.environment),
        "target": row.target and {"kind": row.target[0], "gb": row.target[1], "published": row.published},
    }
    failures = _failures(row, result)
    asked = row.target is not None or row.reference is not None
    unknown = row.reference is not None and compared is None
    return result | {"failures": failures, "met": False if failures else True if asked and not unknown else None}


def _failures(row: Row, result: Mapping[str, Any]) -> list[str]:
    """What was asked of the row and is not so; nothing of one that was not begun."""
    if result["status"] == NOT_RUN:
        return []
    if result["status"] != "finished":
        return [f"{result['status']}: {result['reason']}"]
    failures = list(result["difference"]["wrong"]) if result["difference"] else []
    if row.target is not None and row.limit_gb is not None:
        peak = result[f"{row.target[0]}_gb"]
        if peak is None:
            failures.append(f"{row.target[0]} memory was not measured")
        elif peak > row.limit_gb:
            failures.append(f"{peak:.3f} GB {row.target[0]}, more than {row.limit_gb:.3f}")
    return failures


def _speed(row: Row, found: Mapping[str, Any], peaks: Mapping[str, float]) -> dict[str, Any]:
    """Time of a step without the profiler, and what follows from it."""
    times = found.get("step_seconds", [])
    plain = times[: found.get("profiled", len(times))]
    if not plain:
        return dict.fromkeys(("step_seconds", "samples_per_second", "minutes_an_epoch", "flops_per_sample", "mfu"))
    seconds, operations = median(plain[-LAST:]), found.get("flops_per_sample")
    speed = found["batch_size"] / seconds
    peak = peaks.get(HALF.get(found["precision"], "float32"))
    return {
        "step_seconds": seconds,
        "steps_timed": len(plain[-LAST:]),
        "samples_per_second": speed,
        "minutes_an_epoch": round(EPOCH / speed / 60, 2) if row.recipe == "vit_l_16" else None,
        "tokens_per_second": speed * row.settings["data.tokens"] if "data.tokens" in row.settings else None,
        "published_tokens_per_second": row.tokens_per_second,
        "flops_per_sample": operations,
        "mfu": operations * speed / peak if operations and peak else None,
    }


def read_found(path: Path) -> dict[str, Any]:
    """What ``measured_run.py`` wrote; nothing where it did not come so far."""
    return json.loads(path.read_text()) if path.is_file() else {}


def report(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The table of a part, for all parts, and below it what is not as asked."""
    header = (
        *("run", "GB allocated", "reserved", "process", "s/step", "samples/s", "MFU", "GB to device", "to host"),
        *("loss", "gradient norm", "worst gradient", "target", "met"),
    )
    tables = []
    for name, found in results.items():
        failures = [f"- {row['name']}: {said}" for row in found for said in row["failures"]]
        rates = [
            f"- {row['name']}: {row['tokens_per_second']:,.0f} tokens/s; torchtune on an RTX 4090, compiled: "
            f"{row['published_tokens_per_second']:,.0f}"
            for row in found
            if row.get("tokens_per_second") and row["published_tokens_per_second"]
        ]
        tables.append("\n".join([name, "", table(header, list(map(_cells, found))), "", *failures, *rates]))
    return "\n".join(tables)


def _cells(row: Mapping[str, Any]) -> list[str]:
    difference, copies = row["difference"] or {}, row["copied"] or {}
    worst = max([*difference.get("tensors", {}).values(), difference.get("worst_norm") or 0.0], default=None)
    return [
        row["name"],
        *(figure(row[key], ".3f") for key in ("allocated_gb", "reserved_gb", "process_gb", "step_seconds")),
        figure(row["samples_per_second"], ",.1f"),
        figure(row["mfu"], ".1%"),
        *(figure(copies.get(way) and copies[way] / 1e9, ".2f") for way in ("to_device", "to_host")),
        f"{row['losses'][0]:.4f} → {row['losses'][-1]:.4f}" if row["losses"] else "–",
        figure(difference.get("norm"), ".1e"),
        figure(worst if difference else None, ".1e"),
        f"{row['target']['kind']} {row['target']['gb']:g}" if row["target"] else "–",
        MET[row["met"]] if row["status"] == "finished" else row["status"],
    ]


def figure(value: float | None, form: str) -> str:
    """A number, or a dash for none."""
    return "–" if value is None else format(value, form)
