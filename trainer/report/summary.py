"""How a run ended: ``summary.json`` for programs, a block of text for the person."""

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
from trainer.system.files import read_object
from trainer.system.text import GB, escaped, gigabytes

DISTRIBUTIONS = ("torch", "lightning", "torchvision", "transformers", "datasets", "accelerate")
MOST_BYTES = 1 << 20
LEAST_WHOLE = 10  # samples a second: fewer are shown with a fraction
LEAST_DATA_SHARE = 0.05  # of the time: waiting for data is shown at every step from this share on
LEAST_FAR = 0.1  # GB between predicted and measured peak from which on the share is shown: processes vary by some 10 MB


class Speed(NamedTuple):
    """Training throughput since the run began: columns of ``metrics.csv`` and fields of ``summary.json``."""

    samples_per_second: float  # over all ranks
    tokens_per_second: float | None = None  # likewise, without padding; ``None`` where lengths are not known
    data_share: float = 0.0  # of the time, what the first rank waited for data
    mfu: float | None = None
    """Model FLOPs utilisation (PaLM, Chowdhery et al., 2022): the share that forward and backward take of the device's
    peak, recomputation left out; ``None`` without a prediction, or for a device without a data sheet."""

    def describe(self, least_data_share: float = LEAST_DATA_SHARE) -> list[str]:
        """What is known of it, with units; of waiting for data only if it is ``least_data_share`` at least."""
        samples, tokens, data, mfu = self
        return [
            f"{_number(samples, ',.0f' if samples >= LEAST_WHOLE else '.2f')} samples/s",
            *([] if tokens is None else [f"{_number(tokens, ',.0f')} tokens/s"]),
            *([f"data {_number(100 * data, '.0f')} %"] if data >= least_data_share else []),
            *([] if mfu is None else [f"MFU {_number(100 * mfu, '.1f')} %"]),
        ]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The fields of ``summary.json``, in order."""

    status: str  # how the run ended, such as finished or failed
    steps: int  # taken: batches used up
    skipped_steps: int  # those that moved no weight, because loss or gradient was not finite or nothing had weight
    recoveries: int = 0  # how often a step ran out of memory and was taken again in smaller micro-batches
    world_size: int
    launcher: str  # what started the ranks, such as torchrun
    nodes: int  # machines that they are on
    backend: str | None  # of their process group
    batch_size: int  # samples per step over all ranks
    micro_batch_size: int
    accumulate: int | Mapping[int, int]  # micro-batches per step and rank, or a schedule by epoch
    metrics: Mapping[str, Mapping[str, float | None]]  # figures by split: {"test": {"accuracy": 0 to 1, "loss": ...}}
    best: Mapping[str, Any] | None = None
    """Of the weights in ``model/``, where an evaluation has chosen them: ``{"step", "figure": its name, "best",
    "last"}``."""
    memory: Mapping[str, Any]
    """Peaks in GB (1e9 bytes), the largest over ``ranks_measured`` ranks: ``allocated_gb``, ``reserved_gb`` (``None``
    without a GPU), ``host_peak_gb``; ``host_idle_gb``, the host's before the model was there; and ``phases``:
    ``{"init": {"allocated_gb", "reserved_gb", "host_gb"}, ...}``, ``None`` where not measured.
    ``predicted_reserved_gb``, ``predicted_allocated_gb``, ``predicted_host_gb`` and ``prediction_error`` (predicted /
    measured - 1) are of the planner, where it was asked; without a GPU, reserved means the host's over idle.
    ``host_phase_peaks`` says what ``host_gb`` is: exact, sampled (at the ends of the phase) or whole run."""
    samples_per_second: float  # this and the next three as in Speed
    tokens_per_second: float | None = None
    data_share: float = 0.0
    mfu: float | None = None
    seconds: float  # wall time of training
    versions: Mapping[str, str | None]  # of what the result depends on
    data: Mapping[str, Any] = field(default_factory=dict)
    """Its ``class``, the samples of ``train``, ``val`` and ``test``, and its ``fingerprint``: of the content."""
    attention: Sequence[str] = ()  # torch's kernels of it in the first micro-step, and Liger's; empty if unknown

    def to_json(self) -> str:
        """Strict JSON: a figure that is not finite is written as null, for ``NaN`` is not JSON."""
        content = {field.name: _json_value(getattr(self, field.name)) for field in fields(self)}
        return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def read_summary(path: Path) -> Summary:
    """What ``to_json`` has written to ``path``; a ``RecipeError`` if there is no such file, or it is something else."""
    found = read_object(path, MOST_BYTES)
    if isinstance(schedule := found.get("accumulate"), dict):  # by epoch: JSON has texts for keys alone
        found["accumulate"] = {int(epoch): count for epoch, count in schedule.items() if epoch.isdecimal()}
    try:
        return Summary(**{field.name: found[field.name] for field in fields(Summary) if field.name in found})
    except TypeError as error:
        raise RecipeError(f"{path} is no summary of a run: it was not written by trainer fit") from error


@cache  # to read them takes as long as a step of a small model
def versions() -> dict[str, str | None]:
    """Version of Python and of every library that a result depends on; ``None`` for one that is not installed."""
    from trainer import __version__  # a checkout that is not installed has a version, too

    found = {"python": platform.python_version(), "trainer": __version__, **dict.fromkeys(DISTRIBUTIONS)}
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Labels and figures with their units, the status and the figures of the last evaluation first."""
    skipped = f", {summary.skipped_steps:,} skipped" if summary.skipped_steps else ""
    ranks = f"{summary.world_size} rank{'s' * (summary.world_size > 1)}"
    figures = [(split, *figure) for split, of_split in summary.metrics.items() for figure in of_split.items()]
    speed = Speed(*(getattr(summary, name) for name in Speed._fields))
    return [
        ("status", summary.status),
        *((f"{split} {name}", _metric(name, value)) for split, name, value in figures),
        *([("model/", _kept(summary))] if summary.status == "finished" else []),
        ("steps", f"{summary.steps:,}{skipped}"),
        ("batch", f"{summary.batch_size:,} samples a step on {ranks}"),
        ("speed", ", ".join([*speed.describe(0.0), f"{_number(summary.seconds, ',.1f')} s"])),
        ("peak memory", _memory(summary.memory)),
        *_predicted(summary.memory),
        *_by_phase(summary.memory),
        *([("kernels", ", ".join(summary.attention))] if summary.attention else []),
    ]


def summary_text(summary: Summary, run_dir: Path, writes: bool = False) -> str:
    """The block that is printed at the end of a run, which ends with where the files are and, of a model that
    ``writes``, how to see what."""
    files = ", ".join(sorted(file.name for file in run_dir.iterdir() if file.name[0] != "."))
    rows = [*summary_rows(summary), ("files", f"{run_dir}: {files}")]
    if writes and summary.status == "finished":
        rows.append(("what it writes", f"trainer predict {shlex.quote(str(run_dir))} --text TEXT"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(escaped(f"{label:<{width}}  {value}") for label, value in rows)


def _kept(summary: Summary) -> str:
    best = summary.best
    if best is None:
        alone = "" if summary.data.get("val") else "; there is no validation set that could choose another"
        return f"step {summary.steps:,}, the last{alone}"
    name = best["figure"]
    found, last = (_metric(name.partition("_")[2], best[which]) for which in ("best", "last"))
    return f"step {best['step']:,}, best {name} {found}" + (f"; last {last}" if best["last"] is not None else "")


def _memory(memory: Mapping[str, Any]) -> str:
    kinds = ("allocated", "reserved", "host_peak", "host_idle")  # zero or none: there is no such device
    known = {kind.replace("_", " "): memory.get(f"{kind}_gb") for kind in kinds}
    return ", ".join(f"{gigabytes(value * GB)} {kind}" for kind, value in known.items() if value) or "unknown"


def _predicted(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    predicted, error = memory.get("predicted_reserved_gb"), memory.get("prediction_error")
    if predicted is None:
        return []
    text = gigabytes(predicted * GB) + (" reserved" if memory.get("reserved_gb") else " of the host on top of idle")
    if error is not None:
        far = predicted - predicted / (1 + error)
        share = f" ({abs(100 * error):.1f} %)" if abs(far) >= LEAST_FAR else ""  # of little, any share means nothing
        text += f", {gigabytes(abs(far) * GB)}{share} {'more' if far > 0 else 'less'} than measured"
    return [("predicted", text)]


def _by_phase(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for kind in ("allocated", "reserved") if memory.get("reserved_gb") else ("host",):
        found = [(name, figures[f"{kind}_gb"]) for name, figures in memory.get("phases", {}).items()]
        known = [f"{name} {gigabytes(value * GB)}" for name, value in found if value is not None]
        if known:
            rows.append(("by phase", f"{', '.join(known)} {kind}"))
    return rows


def _metric(name: str, value: float | None) -> str:
    if name.endswith("accuracy") and value is not None:
        return f"{_number(100 * value, '.2f')} %"
    return _number(value, ".4f")


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None or not math.isfinite(value) else format(value, form)


def _json_value(value: Any) -> Any:
    """Plain JSON types: mappings, numbers of numpy and torch, and null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
