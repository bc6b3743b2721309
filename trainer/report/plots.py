"""Pictures of a run: ``curves.png``, drawn from its ``metrics.csv``, and ``memory.png``."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.system.files import staged_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart with any colour vision, and in grey.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
SMOOTHED_SHARE = 50
"""The smoothed curve averages over one fiftieth of the steps."""

Curve = tuple[np.ndarray, np.ndarray]


def plot_curves(metrics_csv: Path, target: Path) -> None:
    """Draw the curves of ``metrics_csv`` as a PNG of 1200 × 800 pixels; columns that are missing are left out."""
    curves = _read(metrics_csv)
    figure = _new_figure(metrics_csv.absolute().parent.name, height=8)
    grid = figure.add_gridspec(2, 2, height_ratios=[3, 1])
    loss = figure.add_subplot(grid[0, 0])
    _draw_loss(loss, curves)
    _draw_accuracy(figure.add_subplot(grid[0, 1], sharex=loss), curves)
    _draw_lr(figure.add_subplot(grid[1, :], sharex=loss), curves)
    _save(figure, target)


def plot_memory(memory: Mapping[str, Any], history: Sequence[tuple[int, float]], target: Path) -> None:
    """Draw peaks by phase, and memory over steps, as a PNG of 1200 × 500 pixels.

    Args:
        memory: as in ``summary.json``: figures in GB by phase; allocated and reserved are drawn where there is a GPU,
            the host's resident memory where there is none.
        history: steps, and memory at their ends in GB: allocated on a GPU, resident elsewhere.
        target: the file to write.
    """
    figure = _new_figure(target.absolute().parent.name, height=5)
    peaks, levels = figure.subplots(1, 2)
    kind = "resident" if memory.get("allocated_gb") is None else "allocated"
    _draw_phases(peaks, memory)
    if history:
        steps, values = np.array(history).T
        levels.plot(steps, values, color=BLUE, linewidth=2, marker="o", markersize=3, label=f"{kind}, first rank")
    if kind == "resident" and memory.get("host_idle_gb") is not None:
        _draw_idle(levels, memory["host_idle_gb"])
    _finish(levels, "Memory at the end of a step", f"{kind} memory (GB)")
    for axes in (peaks, levels):
        axes.set_ylim(0, 1.25 * axes.dataLim.y1 if axes.dataLim.y1 > 0 else 1)  # room for the legend
    _save(figure, target)


def _new_figure(title: str, height: float) -> Figure:
    # Figure without pyplot: no global state, no window, whatever the caller's own backend is.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15)
    return figure


def _save(figure: Figure, target: Path) -> None:
    with staged_file(target) as part:
        figure.savefig(part, format="png")


def _read(metrics_csv: Path) -> dict[str, Curve]:
    """Steps and values of every column, without empty and non-finite cells."""
    with open(metrics_csv, newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        columns = reader.fieldnames or []
    steps = np.array([_number(row.get("step")) for row in rows])
    curves = {}
    for name in columns:
        values = np.array([_number(row.get(name)) for row in rows])
        kept = np.isfinite(steps) & np.isfinite(values)
        curves[name] = (steps[kept], values[kept])
    return curves


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:
        return float("nan")


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred mean over one fiftieth of the values; at the ends over those that there are."""
    half = len(values) // SMOOTHED_SHARE // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _draw_loss(axes: Axes, curves: dict[str, Curve]) -> None:
    if len(curves.get("loss", ((), ()))[0]):
        steps, values = curves["loss"]
        axes.plot(steps, values, color=BLUE, alpha=0.25, linewidth=1, label="training, each step")
        axes.plot(steps, _smooth(values), color=BLUE, linewidth=2, label="training, smoothed")
    _draw_evaluations(axes, curves, "loss", "{:.4f}")
    _finish(axes, "Loss", "mean loss per weighted item")


def _draw_accuracy(axes: Axes, curves: dict[str, Curve]) -> None:
    percent = {name: (steps, 100 * values) for name, (steps, values) in curves.items()}
    _draw_evaluations(axes, percent, "accuracy", "{:.2f} %")
    _finish(axes, "Accuracy", "accuracy (%)")


def _draw_lr(axes: Axes, curves: dict[str, Curve]) -> None:
    if len(curves.get("lr", ((), ()))[0]):
        axes.plot(*curves["lr"], color=GREY, linewidth=2, label="learning rate")
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    _finish(axes, "Learning rate", "learning rate", legend=False)


def _draw_evaluations(axes: Axes, curves: dict[str, Curve], figure: str, form: str) -> None:
    """Validation as a line with dots, test as diamonds; the last value of each in the legend."""
    styles: dict[str, dict[str, Any]] = {
        "val": {"color": ORANGE, "marker": "o", "markersize": 5, "linewidth": 2, "label": "validation"},
        "test": {"color": GREEN, "marker": "D", "markersize": 8, "linestyle": "none", "label": "test"},
    }
    for split, style in styles.items():
        steps, values = curves.get(f"{split}_{figure}", (np.array([]), np.array([])))
        if len(steps):
            style["label"] += f", last {form.format(values[-1])}"
            axes.plot(steps, values, **style)


def _draw_phases(axes: Axes, memory: Mapping[str, Any]) -> None:
    """A group of bars for each phase that was measured."""
    on_gpu = memory.get("allocated_gb") is not None
    kinds = {"allocated_gb": "allocated", "reserved_gb": "reserved"} if on_gpu else {"host_gb": "resident"}
    phases = {
        name: figures for name, figures in memory.get("phases", {}).items() if figures[next(iter(kinds))] is not None
    }
    width = 0.8 / len(kinds)
    for number, ((key, label), colour) in enumerate(zip(kinds.items(), (BLUE, ORANGE), strict=False)):
        at = np.arange(len(phases)) + (number - (len(kinds) - 1) / 2) * width
        bars = axes.bar(at, [figures[key] for figures in phases.values()], width, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=10)
    if not on_gpu and memory.get("host_idle_gb") is not None:
        _draw_idle(axes, memory["host_idle_gb"])
    axes.set_xticks(range(len(phases)), list(phases))
    _finish(axes, "Peaks by phase, the largest over ranks", "peak memory (GB)", x_label="phase")
    axes.set_axisbelow(True)


def _draw_idle(axes: Axes, gigabytes: float) -> None:
    axes.axhline(gigabytes, color=GREY, linestyle="--", linewidth=1.5, label=f"idle, {gigabytes:.2f} GB")


def _finish(axes: Axes, title: str, unit: str, legend: bool = True, x_label: str = "step") -> None:
    axes.set_title(title, fontsize=13)
    axes.set_xlabel(x_label, fontsize=12)
    axes.set_ylabel(unit, fontsize=12)
    axes.grid(alpha=0.3)
    if not axes.lines and not axes.patches:
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", va="center", color=GREY)
    elif legend:
        axes.legend(fontsize=11)
