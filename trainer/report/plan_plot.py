"""``plan.png``: the predicted memory of a plan over a run, by what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.report.plots import BLUE, GREEN, GREY, ORANGE, _new_figure, _save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The rest of Okabe and Ito's colours.
YELLOW, SKY, PURPLE, BLACK = "#E69F00", "#56B4E9", "#CC79A7", "#000000"

CATEGORIES = {
    "params": ("weights", BLUE),
    "optimizer": ("optimizer state", GREEN),
    "gradients": ("gradients", ORANGE),
    "activations": ("activations", YELLOW),
    "temporaries": ("temporaries", PURPLE),
    "batch": ("batch", SKY),
}
"""From the bottom up: what stays first."""

PHASES = {
    "init": GREY,
    "forward": BLUE,
    "backward": ORANGE,
    "step": GREEN,
    "evaluation": PURPLE,
    "saving": GREY,
}
SHORT = {"forward": "fwd", "backward": "bwd", "evaluation": "eval"}
"""For phases with little room."""

BOX = {"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.8, "linewidth": 0}

FAR = 2.5
"""A budget of more than so many times the peak is only written, not drawn: the curves would lie flat."""

LETTERS = 95
"""Of a line of the title."""

LETTER = 0.0078
"""Width of a letter of a phase's label, as part of the width of the picture."""


def plot_plan(timeline: Mapping[str, Any], budget: float, title: str, target: Path) -> None:
    """Draw memory over allocations and frees, 1200 × 650 pixels.

    Args:
        timeline: ``{"allocated": {category: [bytes at each point]}, "reserved": [bytes], "marks": [[point, phase]]}``.
        budget: bytes.
        title: of the picture.
        target: the PNG to write.
    """
    figure = _new_figure("\n".join(line for part in title.splitlines() for line in wrap(part, LETTERS)), height=6.5)
    grid = figure.add_gridspec(2, 1, height_ratios=[1, 18], hspace=0.0)
    axes = figure.add_subplot(grid[1])
    strip = figure.add_subplot(grid[0], sharex=axes)
    reserved = np.array(timeline["reserved"]) / 1e9
    _draw_memory(axes, timeline, reserved)
    _draw_budget(axes, budget / 1e9, float(reserved.max(initial=0.0)))
    _draw_phases(strip, axes, timeline["marks"], len(reserved))
    axes.set_xlim(0, max(1, len(reserved) - 1))
    axes.set_xlabel("allocations and frees, in their order (not to scale in time)", fontsize=12)
    axes.set_ylabel("memory of the device (GB)", fontsize=12)
    axes.set_xticks([])
    axes.grid(axis="y", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    style = {"fontsize": 11, "frameon": False, "columnspacing": 1.4, "handlelength": 1.4, "handletextpad": 0.5}
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), **style)
    _save(figure, target)


def _draw_memory(axes: Axes, timeline: Mapping[str, Any], reserved: np.ndarray) -> None:
    """What is allocated as areas upon each other with a dot at the peak, what is reserved as a line."""
    points = np.arange(len(reserved))
    below = np.zeros(len(reserved))
    for name, (label, colour) in CATEGORIES.items():
        values = np.array(timeline["allocated"].get(name, below * 0)) / 1e9
        if values.any():
            axes.fill_between(
                points, below, below + values, step="post", color=colour, alpha=0.85, linewidth=0, label=label
            )
        below = below + values
    peak = int(below.argmax())
    label = f"allocated: {_figure(below[peak])} GB"
    axes.plot(peak, below[peak], "o", color=BLACK, markersize=6, label=label)
    label = f"reserved: {_figure(reserved.max(initial=0.0))} GB"
    axes.step(points, reserved, where="post", color=GREY, linewidth=2, label=label)


def _draw_budget(axes: Axes, budget: float, peak: float) -> None:
    """A dashed line, or a word where it lies far above."""
    if budget > FAR * peak:
        axes.set_ylim(0, 1.15 * peak or 1)
        axes.text(
            0.99,
            0.97,
            f"budget: {_figure(budget)} GB, far above",
            transform=axes.transAxes,
            ha="right",
            va="top",
            fontsize=12,
        )
        return
    top = 1.12 * max(budget, peak)
    axes.set_ylim(0, top)
    axes.axhline(budget, color=BLACK, linestyle="--", linewidth=2)
    axes.text(
        0.992,
        budget + 0.015 * top,
        f"budget: {_figure(budget)} GB",
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="bottom",
        fontsize=12,
        bbox=BOX,
    )


def _draw_phases(strip: Axes, axes: Axes, marks: list[list[Any]], points: int) -> None:
    """A coloured strip on top, with a word where there is room, and a thin line down at each border."""
    ends = [point for point, _ in marks[1:]] + [points - 1]
    for (start, phase), end in zip(marks, ends, strict=True):
        colour = PHASES.get(phase, GREY)
        strip.axvspan(start, end, color=colour, alpha=0.75, linewidth=0)
        axes.axvline(start, color=GREY, linewidth=0.6, alpha=0.5)
        room = (end - start) / max(1, points - 1) / LETTER - 1
        word = next((word for word in (phase, SHORT.get(phase, "")) if len(word) <= room), "")
        strip.text((start + end) / 2, 0.5, word, ha="center", va="center", color="white", fontsize=10)
    strip.set_ylim(0, 1)
    strip.set_yticks([])
    strip.tick_params(bottom=False, labelbottom=False)
    for spine in strip.spines.values():
        spine.set_visible(False)


def _figure(gigabytes: float) -> str:
    return f"{gigabytes:.2f}" if gigabytes >= 1 else f"{gigabytes:.3f}"
