"""How far predictions are from what was measured: per configuration, in sum, and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from common import table

GOALS = {"median": 0.03, "worst": 0.06, "under": 0.03}
"""Of the relative error: the median and the worst of its size, and how far a prediction may lie below."""

KINDS = ("reserved", "allocated")


def compared(names: Sequence[str], predictions: Mapping[str, Any], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each configuration: bytes predicted and measured, and ``predicted / measured - 1``; ``None`` if either
    is not there."""
    rows = []
    for name in names:
        predicted, found = predictions.get(name, {}).get("prediction", {}), measured.get(name, {})
        row: dict[str, Any] = {"name": name, "status": found.get("status", "not run")}
        if "error" in predicted:
            row["status"] = f"not predicted: {predicted['error']}"
        for kind in KINDS:
            asked, real = predicted.get(kind), found.get(kind)
            row[kind] = {"predicted": asked, "measured": real, "error": asked / real - 1 if asked and real else None}
        rows.append(row)
    return rows


def summed_up(rows: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Median and worst error by kind, how many lie too low, differences of the recordings, and which goals are met."""
    found: dict[str, Any] = {"goals": GOALS, "configurations": len(rows)}
    for kind in KINDS:
        errors = {row["name"]: row[kind]["error"] for row in rows if row[kind]["error"] is not None}
        found[kind] = _spread(errors)
    recordings = [one["recording"] for one in measured.values() if one.get("recording")]
    found["recordings"] = {
        "compared": len(recordings),
        "without_difference": sum(not differs(recording) for recording in recordings),
    }
    return found


def _spread(errors: Mapping[str, float]) -> dict[str, Any]:
    if not errors:
        return {"measured": 0}
    sizes = [abs(error) for error in errors.values()]
    worst = max(errors, key=lambda name: abs(errors[name]))
    under = sorted(name for name, error in errors.items() if error < -GOALS["under"])
    return {
        "measured": len(errors),
        "median": median(sizes),
        "worst": abs(errors[worst]),
        "worst_name": worst,
        "under_predicted": under,
        "met": {
            "median": median(sizes) <= GOALS["median"],
            "worst": abs(errors[worst]) <= GOALS["worst"],
            "under": not under,
        },
    }


def differs(recording: Mapping[str, Any]) -> bool:
    """Whether the simulated allocator did anything but what the real one did, or could not be compared."""
    return "error" in recording or any(
        recording[key] not in (0, None)
        for key in ("allocated_error", "reserved_error", "first_difference", "first_misplaced")
    )


def report(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """All of it for a person: a Markdown table, the sums, and a line for each recording."""
    header = ("configuration", *(f"{kind}: {word}" for kind in KINDS for word in ("predicted GB", "GB", "error")))
    lines = []
    for row in rows:
        cells = [row["name"] if row["status"] == "finished" else f"{row['name']} ({row['status']})"]
        for kind in KINDS:
            cells += [_cell(row[kind]["predicted"]), _cell(row[kind]["measured"]), _percent(row[kind]["error"])]
        lines.append(cells)
    text = [table(header, lines), "", *(_sum_line(kind, summary[kind]) for kind in KINDS)]
    for name, one in measured.items():
        if one.get("recording"):
            text.append(f"recording of {name}: {_recording_line(one['recording'])}")
    return "\n".join(text)


def _sum_line(kind: str, found: Mapping[str, Any]) -> str:
    if not found["measured"]:
        return f"{kind}: nothing was measured"
    met = {True: "met", False: "missed"}
    under = len(found["under_predicted"])
    return (
        f"{kind}: median {_percent(found['median'], '')} (goal {GOALS['median']:.0%}: {met[found['met']['median']]}), "
        f"worst {_percent(found['worst'], '')} (goal {GOALS['worst']:.0%}: {met[found['met']['worst']]}; "
        f"{found['worst_name']}), {under} of {found['measured']} more than {GOALS['under']:.0%} too low "
        f"(goal 0: {met[found['met']['under']]})"
    )


def _recording_line(recording: Mapping[str, Any]) -> str:
    if "error" in recording:
        return f"not replayed: {recording['error']}"
    return (
        f"{recording['allocations']:,} allocations replayed, peaks differ by {recording['reserved_error']:,} bytes "
        f"reserved and {recording['allocated_error']:,} allocated; "
        f"first difference {recording['first_difference']}, first misplaced {recording['first_misplaced']}"
    )


def _cell(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e9:.3f}"


def _percent(error: float | None, sign: str = "+") -> str:
    return "–" if error is None else f"{100 * error:{sign}.1f} %"
