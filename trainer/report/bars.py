"""``ladder.png``: the memory of each rung of a ladder, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.report.plots import BLUE, GREEN, GREY, ORANGE, _new_figure, _save


def plot_ladder(
    rungs: Sequence[tuple[str, Sequence[float | None], str]], kinds: Sequence[str], title: str, target: Path
) -> None:
    """Draw the memory of each rung as bars, 1200 pixels wide.

    Args:
        rungs: label, peak memory in GB of each kind (``None`` for a rung without), and status of each; those whose
            label starts with a plus are stacked, and those with a note in brackets give up something besides memory.
        kinds: what is measured, such as allocated and reserved: the first is drawn solid, in front of the second.
        title: of the picture.
        target: the PNG to write.
    """
    figure = _new_figure(title, height=1.6 + 0.36 * len(rungs))
    axes = figure.add_subplot()
    for place, (label, peaks, status) in enumerate(rungs):
        colour = GREEN if label.startswith("+") else ORANGE if label.endswith(")") else BLUE if place else GREY
        for kind, peak in reversed(list(enumerate(peaks))):
            axes.barh(place, peak or 0, color=colour, alpha=0.3 if kind else 1, height=0.7)
        known = [f"{peak:.2f}" for peak in peaks if peak is not None]
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
