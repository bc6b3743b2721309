"""How a run ended: ``summary.json`` for programs, a block of text for the person."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from trainer.system.text import escaped

DISTRIBUTIONS = ("torch", "lightning", "torchvision", "transformers", "datasets", "accelerate")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The fields of ``summary.json``, in order.

    Args:
        status: how the run ended, such as finished or failed.
        steps: steps taken: batches used up.
        skipped_steps: those that moved no weight, because loss or gradient was not finite or nothing had weight.
        recoveries: how often a step ran out of memory and was taken again in smaller micro-batches.
        world_size: ranks.
        launcher: what started them, such as torchrun.
        nodes: machines that they are on.
        backend: of their process group; ``None`` for one rank without any.
        batch_size: samples per step over all ranks.
        micro_batch_size: samples that go through forward and backward at once.
        accumulate: micro-batches per step and rank, or a schedule by epoch.
        metrics: figures by split: ``{"test": {"accuracy": 0 to 1, "loss": ...}}``.
        memory: peaks in GB (1e9 bytes), the largest over ``ranks_measured`` ranks: ``allocated_gb``, ``reserved_gb``
            (``None`` without a GPU), ``host_peak_gb``; ``host_idle_gb``, the host's before the model was there; and
            ``phases``: ``{"init": {"allocated_gb", "reserved_gb", "host_gb"}, ...}``, ``None`` where not measured.
            ``predicted_reserved_gb``, ``predicted_allocated_gb``, ``predicted_host_gb`` and ``prediction_error``
            (predicted / measured - 1) are of the planner, where it was asked; without a GPU, reserved means the
            host's over idle. ``host_phase_peaks`` says what ``host_gb`` is: exact, sampled (at the ends of the phase)
            or whole run.
        samples_per_second: training throughput over all ranks.
        seconds: wall time of training.
        versions: of what the result depends on; see :func:`versions`.
    """

    status: str
    steps: int
    skipped_steps: int
    recoveries: int = 0
    world_size: int
    launcher: str
    nodes: int
    backend: str | None
    batch_size: int
    micro_batch_size: int
    accumulate: int | Mapping[int, int]
    metrics: Mapping[str, Mapping[str, float | None]]
    memory: Mapping[str, Any]
    samples_per_second: float
    seconds: float
    versions: Mapping[str, str | None]

    def to_json(self) -> str:
        """Strict JSON: a figure that is not finite is written as null, for ``NaN`` is not JSON."""
        content = {field.name: _json_value(getattr(self, field.name)) for field in fields(self)}
        return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def versions() -> dict[str, str | None]:
    """Version of Python and of every library that a result depends on; ``None`` for one that is not installed."""
    from trainer import __version__  # a checkout that is not installed has a version, too

    found = {name: _version(name) for name in DISTRIBUTIONS}
    return {"python": platform.python_version(), "trainer": __version__} | found


def summary_text(summary: Summary, run_dir: Path) -> str:
    """The block that is printed at the end of a run: figures with their units, and where the files are."""
    skipped = f", {summary.skipped_steps:,} skipped" if summary.skipped_steps else ""
    rows = [
        ("status", summary.status),
        *(
            (f"{split} {name}", _metric(name, figures[name]))
            for split, figures in summary.metrics.items()
            for name in figures
        ),
        ("steps", f"{summary.steps:,}{skipped}"),
        (
            "batch",
            f"{summary.batch_size:,} samples a step on {summary.world_size} rank{'s' * (summary.world_size > 1)}",
        ),
        ("speed", f"{_number(summary.samples_per_second, ',.0f')} samples/s, {_number(summary.seconds, ',.1f')} s"),
        ("peak memory", _memory(summary.memory)),
        *_predicted(summary.memory),
        *_by_phase(summary.memory),
        ("files", f"{run_dir}: {', '.join(sorted(file.name for file in run_dir.iterdir() if file.name[0] != '.'))}"),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(escaped(f"{label:<{width}}  {value}") for label, value in rows)


def _memory(memory: Mapping[str, Any]) -> str:
    labels = {
        "allocated_gb": "allocated",
        "reserved_gb": "reserved",
        "host_peak_gb": "host peak",
        "host_idle_gb": "host idle",
    }
    # Zero or none: there is no such device.
    known = [f"{memory[key]:.2f} GB {label}" for key, label in labels.items() if memory.get(key)]
    return ", ".join(known) or "unknown"


def _predicted(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The peak that was predicted, and how far it is from the measured one."""
    predicted, error = memory.get("predicted_reserved_gb"), memory.get("prediction_error")
    if predicted is None:
        return []
    kind = "reserved" if memory.get("reserved_gb") else "host, over idle"
    if error is None:
        return [("predicted", f"{predicted:.2f} GB {kind}")]
    far = predicted - predicted / (1 + error)
    distance = f"{abs(far):.2f} GB ({abs(100 * error):.1f} %) {'more' if far > 0 else 'less'} than measured"
    return [("predicted", f"{predicted:.2f} GB {kind}: {distance}")]


def _by_phase(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A row for each kind of memory that the device has: peaks by phase."""
    on_gpu = memory.get("reserved_gb")
    kinds = {"allocated_gb": "allocated", "reserved_gb": "reserved"} if on_gpu else {"host_gb": "host"}
    rows = []
    for key, label in kinds.items():
        known = [(name, figures[key]) for name, figures in memory.get("phases", {}).items() if figures[key] is not None]
        if known:
            rows.append(("by phase", ", ".join(f"{name} {value:.2f}" for name, value in known) + f" GB {label}"))
    return rows


def _metric(name: str, value: float | None) -> str:
    if name == "accuracy" and value is not None:
        return f"{_number(100 * value, '.2f')} %"
    return _number(value, ".4f")


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None or not math.isfinite(value) else format(value, form)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _json_value(value: Any) -> Any:
    """Plain JSON types: mappings, numbers of numpy and torch, and null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
