"""The summary of a run: ``summary.json`` for programs, a block of text for the user."""

from __future__ import annotations

import json
import math
import platform
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import RecipeError
from trainer.system.files import read_json_object
from trainer.system.text import GB, escaped, format_bytes, format_metric, format_number

DISTRIBUTIONS = ("torch", "lightning", "torchvision", "transformers", "datasets", "accelerate")
MAX_SUMMARY_BYTES = 1 << 20
MIN_INTEGER_SPEED = 10  # samples per second below which decimals are shown
MIN_DATA_SHARE = 0.05  # min share of time spent on waiting for data that is shown at every step
MIN_PEAK_DIFFERENCE = 0.1  # min GB between predicted and measured peak for a percentage: processes vary by some 10 MB


class Speed(NamedTuple):
    """Training throughput since the start of the run: columns of ``metrics.csv`` and fields of ``summary.json``."""

    samples_per_second: float  # over all ranks
    tokens_per_second: float | None = None  # over all ranks, without padding; ``None`` if lengths are unknown
    data_share: float = 0.0  # share of time that the first rank waited for data
    mfu: float | None = None
    """Model FLOPs utilisation (PaLM, Chowdhery et al., 2022): FLOPs of forward and backward as a share of the device's
    peak, without recomputation; ``None`` without a prediction, or for a device without a data sheet."""

    def describe(self, min_data_share: float = MIN_DATA_SHARE) -> list[str]:
        """Return the known values with units; waiting for data only from ``min_data_share`` on."""
        samples, tokens, data, mfu = self
        return [
            f"{format_number(samples, ',.0f' if samples >= MIN_INTEGER_SPEED else '.2f')} samples/s",
            *([] if tokens is None else [f"{format_number(tokens, ',.0f')} tokens/s"]),
            *([f"data {format_number(100 * data, '.0f')} %"] if data >= min_data_share else []),
            *([] if mfu is None else [f"MFU {format_number(100 * mfu, '.1f')} %"]),
        ]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The fields of ``summary.json``, in order."""

    status: str  # how the run ended, such as finished or failed
    steps: int  # steps taken, including skipped ones
    skipped_steps: int  # steps without an update, because loss or gradient was not finite or nothing had weight
    recoveries: int = 0  # number of steps that ran out of memory and were repeated with smaller micro-batches
    world_size: int
    launcher: str  # the launcher of the ranks, such as torchrun
    nodes: int  # number of machines
    backend: str | None  # backend of the process group
    batch_size: int  # samples per step over all ranks
    micro_batch_size: int
    accumulate: int | Mapping[int, int]  # micro-batches per step and rank, or a schedule by epoch
    metrics: Mapping[str, Mapping[str, float | None]]  # by split: {"test": {"accuracy": 0 to 1, "loss": ...}}
    best: Mapping[str, Any] | None = None
    """The evaluation that chose the weights in ``model/``, if any: ``{"step", "figure": name of the metric, "best",
    "last"}``."""
    memory: Mapping[str, Any]
    """Peaks in GB (1e9 bytes), the largest over ``ranks_measured`` ranks: ``allocated_gb``, ``reserved_gb`` (``None``
    without a GPU), ``host_peak_gb``; ``host_idle_gb``, the host memory before the model was built; and ``phases``:
    ``{"init": {"allocated_gb", "reserved_gb", "host_gb"}, ...}``, ``None`` if not measured.
    ``predicted_reserved_gb``, ``predicted_allocated_gb``, ``predicted_host_gb`` and ``prediction_error`` (predicted /
    measured - 1) come from the planner, if it ran; without a GPU, reserved means host memory above idle.
    ``host_phase_peaks`` is the kind of ``host_gb``: exact, sampled (at the ends of the phase) or whole run."""
    samples_per_second: float  # this and the next three as in Speed
    tokens_per_second: float | None = None
    data_share: float = 0.0
    mfu: float | None = None
    seconds: float  # wall time of training
    total_seconds: float | None = None  # wall time since the command or fit() began, until results are written
    versions: Mapping[str, str | None]  # versions of Python and the libraries
    data: Mapping[str, Any] = field(default_factory=dict)
    """The ``class`` of the data, the number of samples of ``train``, ``val`` and ``test``, and the ``fingerprint`` of
    their content."""
    attention: Sequence[str] = ()  # attention kernels of torch in the first micro-step, and of Liger; empty if unknown

    def to_json(self) -> str:
        """Return strict JSON: values that are not finite are written as null, because ``NaN`` is not JSON."""
        content = {field.name: _json_value(getattr(self, field.name)) for field in fields(self)}
        return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def read_summary(path: Path) -> Summary:
    """Read a summary that ``to_json`` wrote to ``path``; reject a file that is missing or not a summary."""
    found = read_json_object(path, MAX_SUMMARY_BYTES)
    if isinstance(schedule := found.get("accumulate"), dict):  # by epoch; JSON keys are strings
        found["accumulate"] = {int(epoch): count for epoch, count in schedule.items() if epoch.isdecimal()}
    try:
        return Summary(**{field.name: found[field.name] for field in fields(Summary) if field.name in found})
    except TypeError as error:
        raise RecipeError(f"{path} is not the summary of a run: use a file written by trainer fit") from error


@cache  # reading them takes as long as a step of a small model
def versions() -> dict[str, str | None]:
    """Return the versions of Python and of every library that affects results; ``None`` if not installed."""
    from trainer import __version__  # also defined in a checkout that is not installed

    found = {"python": platform.python_version(), "trainer": __version__, **dict.fromkeys(DISTRIBUTIONS)}
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return labels and values with units; the status and the metrics of the last evaluation come first."""
    skipped = f", {summary.skipped_steps:,} skipped" if summary.skipped_steps else ""
    ranks = f"{summary.world_size} rank{'s' * (summary.world_size > 1)}"
    values = [(split, *metric) for split, of_split in summary.metrics.items() for metric in of_split.items()]
    return [
        ("status", summary.status),
        *((f"{split} {name}", format_metric(name, value)) for split, name, value in values),
        *([("model/", _kept(summary))] if summary.status == "finished" else []),
        ("steps", f"{summary.steps:,}{skipped}"),
        ("batch", f"{summary.batch_size:,} samples per step on {ranks}"),
        ("speed", f"{_speed(summary)}, {format_number(summary.seconds, ',.1f')} s"),
        ("peak memory", _memory(summary.memory)),
        *_predicted(summary.memory),
        *_by_phase(summary.memory),
        *([("kernels", ", ".join(summary.attention))] if summary.attention else []),
    ]


def summary_text(summary: Summary, run_dir: Path, writes: bool = False) -> str:
    """Return the lines for the end of a run, with its files and, for a model that ``writes``, a command to show it."""
    files = ", ".join(sorted(file.name for file in run_dir.iterdir() if file.name[0] != "."))
    rows = [*_brief_rows(summary), ("files", f"{run_dir}: {files}")]
    if writes and summary.status == "finished":
        rows.append(("what it writes", f"trainer predict {shlex.quote(str(run_dir))} --text TEXT"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(escaped(f"{label:<{width}}  {value}") for label, value in rows)


def _brief_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return what a user wants to know first; ``summary.json`` and ``report.html`` have the rest."""
    rows, total = dict(summary_rows(summary)), summary.total_seconds
    skipped = f", {summary.skipped_steps:,} skipped" if summary.skipped_steps else ""
    steps = f"{summary.steps:,} step{'s' * (summary.steps != 1)}{skipped}"
    took = f"{format_number(summary.seconds, ',.1f')} s of training" + (f", {total:,.1f} s in all" if total else "")
    metrics = {
        split: ", ".join(f"{name} {format_metric(name, value)}" for name, value in of_split.items())
        for split, of_split in summary.metrics.items()
    }
    return [
        ("status", f"{summary.status} after {steps}: {took}"),
        *metrics.items(),
        *([("model/", rows["model/"])] if "model/" in rows else []),
        ("speed", f"{_speed(summary)}; {rows['batch']}"),
        ("memory", _brief_memory(summary.memory)),
        *([("kernels", rows["kernels"])] if "kernels" in rows else []),
    ]


def _speed(summary: Summary) -> str:
    return ", ".join(Speed(*(getattr(summary, name) for name in Speed._fields)).describe(0.0))


def _brief_memory(memory: Mapping[str, Any]) -> str:
    values = {key: memory.get(f"{key}_gb") for key in ("reserved", "allocated", "host_peak", "host_idle")}
    known = {key: format_bytes(value * GB) for key, value in values.items() if value}
    predicted, error = memory.get("predicted_reserved_gb"), memory.get("prediction_error")
    expected = f", predicted {format_bytes(predicted * GB)}" if predicted is not None else ""
    if "reserved" in known:
        share = f" ({100 * error:+.1f} %)" if error is not None else ""
        return f"{known['reserved']} reserved{expected}{share}, {known.get('allocated', '0 MB')} allocated"
    if "host_idle" in known and "host_peak" in known:
        above = format_bytes((memory["host_peak_gb"] - memory["host_idle_gb"]) * GB)
        return f"{above} of host memory for training{expected}; {known['host_peak']} with Python and libraries"
    return _memory(memory)


def _kept(summary: Summary) -> str:
    best = summary.best
    if best is None:
        alone = "" if summary.data.get("val") else "; there is no validation set to choose a better step"
        return f"step {summary.steps:,}, the last{alone}"
    name = best["figure"]
    found, last = (format_metric(name.partition("_")[2], best[which]) for which in ("best", "last"))
    return f"step {best['step']:,}, best {name} {found}" + (f"; last {last}" if best["last"] is not None else "")


def _memory(memory: Mapping[str, Any]) -> str:
    kinds = ("allocated", "reserved", "host_peak", "host_idle")  # 0 or None without such a device
    known = {kind.replace("_", " "): memory.get(f"{kind}_gb") for kind in kinds}
    return ", ".join(f"{format_bytes(value * GB)} {kind}" for kind, value in known.items() if value) or "unknown"


def _predicted(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    predicted, error = memory.get("predicted_reserved_gb"), memory.get("prediction_error")
    if predicted is None:
        return []
    text = format_bytes(predicted * GB) + (" reserved" if memory.get("reserved_gb") else " of host memory for training")
    if error is not None:
        measured = predicted / (1 + error)
        is_large = abs(predicted - measured) >= MIN_PEAK_DIFFERENCE  # a share is meaningless for small peaks
        text += f", measured {format_bytes(measured * GB)}" + (f" ({100 * error:+.1f} %)" if is_large else "")
    return [("predicted", text)]


def _by_phase(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for kind in ("allocated", "reserved") if memory.get("reserved_gb") else ("host",):
        found = [(name, values[f"{kind}_gb"]) for name, values in memory.get("phases", {}).items()]
        known = [f"{name} {format_bytes(value * GB)}" for name, value in found if value is not None]
        if known:
            rows.append(("by phase", f"{', '.join(known)} {kind}"))
    return rows


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
