"""``curves.png``: loss, accuracy and learning rate of a run, drawn from its ``metrics.csv``."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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


def _new_figure(title: str, height: float) -> Figure:
    # Figure without pyplot: no global state, no window, whatever the caller's own backend is.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15)
    return figure


def _save(figure: Figure, target: Path) -> None:
    part = target.with_name(f".{target.name}.part")
    figure.savefig(part, format="png")
    os.replace(part, target)


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


def _finish(axes: Axes, title: str, unit: str, legend: bool = True) -> None:
    axes.set_title(title, fontsize=13)
    axes.set_xlabel("step", fontsize=12)
    axes.set_ylabel(unit, fontsize=12)
    axes.grid(alpha=0.3)
    if not axes.lines:
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", va="center", color=GREY)
    elif legend:
        axes.legend(fontsize=11)
