"""Plots of a run, such as ``curves.png``, drawn from ``metrics.csv``, and ``memory.png``."""

from __future__ import annotations

import csv
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.system.files import staged_file
from trainer.system.text import GB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: distinguishable with any colour vision, and in grey.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
SMOOTHED_SHARE = 50  # the smoothed curve averages over one fiftieth of the steps
Curve = tuple[np.ndarray, np.ndarray]


def plot_curves(metrics_csv: Path, target: Path, best: int | None = None) -> None:
    """Draw ``metrics_csv`` as a PNG, 1200 pixels wide; ``best`` marks the step whose weights are kept."""
    curves = read_metrics(metrics_csv)
    columns = [name.partition("_") for name, (steps, _) in curves.items() if len(steps)]
    names = [*dict.fromkeys(name for split, _, name in columns if split in ("val", "test") and name != "loss")]
    rows = len(names) // 2 + 1
    height = 4.5 + 3.5 * rows
    figure = _new_figure(metrics_csv.absolute().parent.name, height, (0.64 / height, 1 - 0.72 / height, 0.55))
    grid = figure.add_gridspec(rows + 1, 2, height_ratios=[3] * rows + [1])
    loss = figure.add_subplot(grid[0, 0] if names else grid[0, :])
    steps, values = curves["loss"]
    if len(steps):
        loss.plot(steps, values, color=BLUE, alpha=0.25, linewidth=1, label="training, each step")
        loss.plot(steps, _smooth(values), color=BLUE, linewidth=2, label="training, smoothed")
    _draw_evaluations(loss, curves, "loss", "{:.4f}")
    _mark(loss, best)
    _finish(loss, "Loss", "loss per sample or token")
    for place, name in enumerate(names, start=1):
        share = name.endswith("accuracy")
        label, axes = name.replace("_", " "), figure.add_subplot(grid[place // 2, place % 2], sharex=loss)
        _draw_evaluations(axes, curves, name, "{:.2f} %" if share else "{:.4f}", factor=100 if share else 1)
        _mark(axes, best)
        _finish(axes, label[0].upper() + label[1:], f"{label} (%)" if share else label)
    rate = figure.add_subplot(grid[-1, :], sharex=loss)
    if len(curves["lr"][0]):
        rate.plot(*curves["lr"], color=GREY, linewidth=2, label="learning rate")
        rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    _finish(rate, "Learning rate", "learning rate", legend=False)
    _save(figure, target)


def plot_memory(memory: Mapping[str, Any], history: Sequence[tuple[int, float]], target: Path) -> None:
    """Draw peaks by phase, and memory over steps (``history``, in GB), as a PNG of 1200 × 500 pixels.

    ``memory`` is that of ``summary.json``: allocated and reserved on a GPU, otherwise resident.
    """
    figure = _new_figure(target.absolute().parent.name, height=5, margins=(0.23, 0.86, 0.2))
    peaks, levels = figure.subplots(1, 2)
    on_gpu, idle = memory.get("allocated_gb") is not None, memory.get("host_idle_gb")
    kind = "allocated" if on_gpu else "resident"
    kinds = {"allocated_gb": "allocated", "reserved_gb": "reserved"} if on_gpu else {"host_gb": kind}
    _draw_phases(peaks, memory, kinds)
    if history:
        steps, values = np.array(history).T
        levels.plot(steps, values, color=BLUE, linewidth=2, marker="o", markersize=3, label=f"{kind}, first rank")
    if not on_gpu and idle is not None:
        for axes in (peaks, levels):
            axes.axhline(idle, color=GREY, linestyle="--", linewidth=1.5, label=f"idle, {format_bytes(idle * GB)}")
    _finish(peaks, "Peaks by phase, the largest over ranks", "peak memory (GB)", x_label="phase")
    peaks.set_axisbelow(True)
    _finish(levels, "Memory at the end of a step", f"{kind} memory (GB)")
    for axes in (peaks, levels):
        axes.set_ylim(0, 1.1 * axes.dataLim.y1 if axes.dataLim.y1 > 0 else 1)  # room for the numbers on the bars
    _save(figure, target)


def _new_figure(title: str, height: float, margins: tuple[float, float, float] | None = None) -> Figure:
    """Create a figure; with given ``margins`` (bottom, top, between rows) in half the time of an automatic layout."""
    # Without pyplot: no global state, no window, independent of the caller's backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, height), dpi=100, layout=None if margins else "constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15)
    if margins:
        bottom, top, between = margins
        figure.suptitle(title, fontsize=15, y=1 - 0.16 / height)
        figure.subplots_adjust(left=0.065, right=0.985, bottom=bottom, top=top, hspace=between, wspace=0.17)
    return figure


def _save(figure: Figure, target: Path) -> None:
    with staged_file(target) as part:
        figure.savefig(part, format="png")


def read_metrics(metrics_csv: Path) -> defaultdict[str, Curve]:
    """Return the steps and values of each column of ``metrics_csv``; no column if there is no file."""
    with open(metrics_csv if metrics_csv.exists() else os.devnull, newline="") as file:
        reader = csv.DictReader(file)
        rows, columns = list(reader), reader.fieldnames or ()
    steps = np.array([_number(row.get("step")) for row in rows])
    curves: defaultdict[str, Curve] = defaultdict(lambda: (np.array([]), np.array([])))
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
    """Return the centred mean over one fiftieth of the values, and over fewer at the ends."""
    half = len(values) // SMOOTHED_SHARE // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _draw_evaluations(axes: Axes, curves: Mapping[str, Curve], metric: str, form: str, factor: float = 1) -> None:
    styles: dict[str, dict[str, Any]] = {
        "val": {"color": ORANGE, "marker": "o", "markersize": 5, "linewidth": 2, "label": "validation"},
        "test": {"color": GREEN, "marker": "D", "markersize": 8, "linestyle": "none", "label": "test"},
    }
    for split, style in styles.items():
        steps, values = curves[f"{split}_{metric}"]
        if len(steps):
            style["label"] += f", last {form.format(factor * values[-1])}"
            axes.plot(steps, factor * values, **style)


def _mark(axes: Axes, best: int | None) -> None:
    if best is not None and axes.lines:
        axes.axvline(best, color=BLACK, linestyle="--", linewidth=1.5, label=f"model/: step {best:,}")


def _draw_phases(axes: Axes, memory: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    first, *_ = kinds
    phases = {name: values for name, values in memory.get("phases", {}).items() if values[first] is not None}
    width = 0.8 / len(kinds)
    for number, ((key, label), colour) in enumerate(zip(kinds.items(), (BLUE, ORANGE), strict=False)):
        at = np.arange(len(phases)) + (number - (len(kinds) - 1) / 2) * width
        bars = axes.bar(at, [values[key] for values in phases.values()], width, color=colour, label=label)
        axes.bar_label(bars, [format_bytes(values[key] * GB) for values in phases.values()], fontsize=10)
    axes.set_xticks(range(len(phases)), list(phases))


def _finish(axes: Axes, title: str, unit: str, legend: bool = True, x_label: str = "step") -> None:
    axes.set_title(title, fontsize=13)
    axes.set_xlabel(x_label, fontsize=12)
    if x_label == "step":
        axes.locator_params(axis="x", integer=True)
    axes.set_ylabel(unit, fontsize=12)
    axes.grid(alpha=0.3)
    if not axes.lines and not axes.patches:
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", va="center", color=GREY)
    elif legend:
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}  # so that it hides no curve
        axes.legend(**below, fontsize=9, frameon=False, ncols=3, columnspacing=1.0)


# ``confusion.png``: the confusion matrix.

MAX_ANNOTATED_CLASSES, MAX_NAME_CHARS = 20, 24  # max classes for counts in cells; max letters of a name


def plot_confusion(confusion: np.ndarray, names: Sequence[str], title: str, target: Path) -> None:
    """Draw counts, a row for each true class, coloured by their share of it, as a PNG of 1200 × 1000 pixels."""
    figure = _new_figure(title, height=10)
    axes, classes = figure.add_subplot(), len(names)
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    if classes <= MAX_ANNOTATED_CLASSES:
        for row, column in zip(*np.nonzero(confusion), strict=True):
            colour = "white" if shares[row, column] > 0.6 else "black"
            axes.text(column, row, f"{confusion[row, column]}", ha="center", va="center", color=colour, fontsize=10)
    shown = [name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 1]}…" for name in names]
    shown = [name.replace("$", r"\$") for name in shown]  # not a formula
    axes.set_xticks(range(classes), shown, rotation=90 if max(map(len, shown), default=0) > 3 else 0)
    axes.set_yticks(range(classes), shown)
    axes.set_xlabel("predicted class", fontsize=12)
    axes.set_ylabel("true class", fontsize=12)
    with warnings.catch_warnings():  # about letters that the font lacks; the csv has them
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        _save(figure, target)


def plot_lr_range_test(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], chosen_lr: float, target: Path
) -> None:
    """Draw the loss of a range test over learning rates, and the chosen rate, as a PNG of 1200 × 600 pixels."""
    figure = _new_figure(target.absolute().parent.name, height=6, margins=(0.19, 0.89, 0.2))
    axes = figure.add_subplot()
    axes.plot(rates, losses, color=BLUE, alpha=0.25, linewidth=1, label="each step")
    axes.plot(rates, smoothed, color=BLUE, linewidth=2, label="smoothed")
    axes.axvline(chosen_lr, color=BLACK, linestyle="--", linewidth=1.5, label=f"falls fastest: {chosen_lr:.1e}")
    axes.set_xscale("log")
    start, least = smoothed[0], min(smoothed)
    axes.set_ylim(least - 0.3 * (start - least), start + 0.7 * (start - least))  # a diverging loss is off the picture
    _finish(axes, "Loss while the learning rate grows", "loss per sample or token", x_label="learning rate")
    _save(figure, target)


# ``ladder.png``: the memory of each rung of a ladder, side by side.


def plot_ladder(
    rungs: Sequence[tuple[str, Sequence[float | None], str]], kinds: Sequence[str], title: str, target: Path
) -> None:
    """Draw the memory of each rung as bars, as a PNG 1200 pixels wide.

    ``rungs`` have a label, the peak in GB of each kind (``None``: unknown), and the status. A label with a leading plus
    is a stacked rung. One with a note in brackets costs more than memory. The first of ``kinds`` is drawn in front.
    """
    figure = _new_figure(title, height=1.6 + 0.36 * len(rungs))
    axes = figure.add_subplot()
    for place, (label, peaks, status) in enumerate(rungs):
        colour = GREEN if label.startswith("+") else ORANGE if label.endswith(")") else BLUE if place else GREY
        for kind, peak in reversed(list(enumerate(peaks))):
            axes.barh(place, peak or 0, color=colour, alpha=0.3 if kind else 1, height=0.7)
        known = [format_bytes(peak * GB) for peak in peaks if peak is not None]
        text = " / ".join(known) if status == "finished" else " ".join([*known, status])
        axes.text(max(peak or 0 for peak in peaks), place, f"  {text}", va="center", fontsize=10)
    axes.set_yticks(range(len(rungs)), [label for label, _, _ in rungs], fontsize=11)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"peak memory: {' / '.join(kinds)} (GB)", fontsize=12)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    _save(figure, target)


# ``plan.png``: the predicted memory of a plan over a run, by category.

YELLOW, SKY, PURPLE, BLACK = "#E69F00", "#56B4E9", "#CC79A7", "#000000"

CATEGORIES = {
    "params": ("weights", BLUE),
    "optimizer": ("optimizer state", GREEN),
    "gradients": ("gradients", ORANGE),
    "activations": ("activations", YELLOW),
    "temporaries": ("temporaries", PURPLE),
    "batch": ("batch", SKY),
}  # from the bottom up: lasting memory first
PHASES = {"init": GREY, "forward": BLUE, "backward": ORANGE, "step": GREEN, "evaluation": PURPLE, "saving": GREY}
SHORT = {"forward": "fwd", "backward": "bwd", "evaluation": "eval"}  # for phases with little room
BOX = {"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.8, "linewidth": 0}
FAR = 2.5  # a budget above this multiple of the peak is written, not drawn, because the curves would be flat
LETTERS = 95  # max letters per line of the title
LETTER = 0.0078  # width of a letter of a phase's label, as a share of the width of the picture


def plot_plan(timeline: Mapping[str, Any], budget: float, title: str, target: Path) -> None:
    """Draw memory over allocations and frees, with the ``budget`` in bytes, as a PNG of 1200 × 650 pixels.

    ``timeline``: ``{"allocated": {category: [bytes at each point]}, "reserved": [bytes], "marks": [[point, phase]]}``.
    """
    figure = _new_figure("\n".join(line for part in title.splitlines() for line in wrap(part, LETTERS)), height=6.5)
    grid = figure.add_gridspec(2, 1, height_ratios=[1, 18], hspace=0.0)
    axes = figure.add_subplot(grid[1])
    strip = figure.add_subplot(grid[0], sharex=axes)
    reserved = np.array(timeline["reserved"]) / 1e9
    _draw_memory(axes, timeline, reserved)
    _draw_budget(axes, budget / 1e9, float(reserved.max(initial=0.0)))
    _draw_predicted_phases(strip, axes, timeline["marks"], len(reserved))
    axes.set(xlim=(0, max(1, len(reserved) - 1)), xticks=[])
    axes.set_xlabel("allocations and frees, in their order (not to scale in time)", fontsize=12)
    axes.set_ylabel("memory of the device (GB)", fontsize=12)
    axes.grid(axis="y", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    style = {"fontsize": 11, "frameon": False, "columnspacing": 1.4, "handlelength": 1.4, "handletextpad": 0.5}
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), **style)
    _save(figure, target)


def _draw_memory(axes: Axes, timeline: Mapping[str, Any], reserved: np.ndarray) -> None:
    points, below = np.arange(len(reserved)), np.zeros(len(reserved))
    for name, (label, colour) in CATEGORIES.items():
        values = np.array(timeline["allocated"].get(name, below * 0)) / 1e9
        if values.any():
            style: dict[str, Any] = {"color": colour, "alpha": 0.85, "linewidth": 0, "label": label}
            axes.fill_between(points, below, below + values, step="post", **style)
        below = below + values
    peak = int(below.argmax())
    axes.plot(peak, below[peak], "o", color=BLACK, markersize=6, label=f"allocated: {format_bytes(below[peak] * GB)}")
    label = f"reserved: {format_bytes(reserved.max(initial=0.0) * GB)}"
    axes.step(points, reserved, where="post", color=GREY, linewidth=2, label=label)


def _draw_budget(axes: Axes, budget: float, peak: float) -> None:
    label, is_far = f"budget: {format_bytes(budget * GB)}", budget > FAR * peak
    top = 1.15 * peak or 1 if is_far else 1.12 * max(budget, peak)
    axes.set_ylim(0, top)
    if is_far:
        style: dict[str, Any] = {"ha": "right", "fontsize": 12}
        axes.text(0.99, 0.97, f"{label}, far above", transform=axes.transAxes, va="top", **style)
    else:
        axes.axhline(budget, color=BLACK, linestyle="--", linewidth=2)
        style = {"ha": "right", "fontsize": 12, "bbox": BOX, "transform": axes.get_yaxis_transform()}
        axes.text(0.992, budget + 0.015 * top, label, va="bottom", **style)


def _draw_predicted_phases(strip: Axes, axes: Axes, marks: list[list[Any]], points: int) -> None:
    ends = [point for point, _ in marks[1:]] + [points - 1]
    for (start, phase), end in zip(marks, ends, strict=True):
        strip.axvspan(start, end, color=PHASES.get(phase, GREY), alpha=0.75, linewidth=0)
        axes.axvline(start, color=GREY, linewidth=0.6, alpha=0.5)
        room = (end - start) / max(1, points - 1) / LETTER - 1
        word = next((word for word in (phase, SHORT.get(phase, "")) if len(word) <= room), "")
        strip.text((start + end) / 2, 0.5, word, ha="center", va="center", color="white", fontsize=10)
    strip.set(ylim=(0, 1), yticks=[])
    strip.tick_params(bottom=False, labelbottom=False)
    for spine in strip.spines.values():
        spine.set_visible(False)
