"""Progress of training and planning: a bar on a terminal, otherwise plain lines every few seconds."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import shorten
from types import MappingProxyType
from typing import Any, TextIO

from tqdm import tqdm

from trainer.report.summary import Speed
from trainer.system import status_line
from trainer.system.redact import redact
from trainer.system.text import escaped, format_metric

Clock = Callable[[], float]
LINE_INTERVAL = 5.0
CELLS = 10  # width of the bar; on a narrow terminal, metrics have priority
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}"
BETWEEN = " · "


class ProgressBar(tqdm):
    """A progress bar that omits metrics instead of cutting them off: if ``fields`` and ten cells do not fit, it omits
    those in ``drop_order``, then shrinks to one cell at least."""

    fields: Mapping[str, str] = MappingProxyType({})
    drop_order: Sequence[str] = ()

    @property
    def format_dict(self) -> dict[str, Any]:
        found = super().format_dict
        width = found["ncols"] or math.inf

        def takes(texts: Iterable[str]) -> int:
            return len(tqdm.format_meter(**found | {"ncols": None, "postfix": BETWEEN.join(texts)}))  # with 10 cells

        left = dict(self.fields)
        for name in self.drop_order:
            if takes(left.values()) > width:
                left.pop(name, None)
        text, room = BETWEEN.join(left.values()), width - takes(["-"]) + CELLS
        if len(text) > room:
            text = shorten(text, int(room), placeholder=" …") if room > CELLS else ""
        return found | {"postfix": text}


def warn(text: str) -> None:
    """Print a warning without secrets, above the bar if one is shown."""
    tqdm.write(escaped(f"trainer: warning: {redact(text)}"), file=sys.stderr)


class Progress:
    """Shows the progress of work on the first rank, as a bar if ``stream`` is a terminal of known width, else as lines.
    ``enabled=False`` hides bars, steps, evaluations and descriptions of the run, but no notices and warnings."""

    def __init__(
        self, enabled: bool = True, rank: int = 0, *, stream: TextIO | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._shown, self._rank, self._clock = enabled and rank == 0, rank, clock
        if not enabled:
            status_line.clear_status()
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = _shows_a_bar(self._stream)
        self._bar: Any = None
        self._pending: str | None = None
        self._total_steps, self._next_line = 0, float("-inf")
        self._first_step, self._began = 0, self._clock()

    def start(self, total_steps: int, first_step: int = 0) -> None:
        """Start to count to ``total_steps``; ``first_step`` of them are done already (a resumed run)."""
        self._total_steps, self._next_line = total_steps, float("-inf")
        self._first_step, self._began = first_step, self._clock()
        if self._shown and self._terminal:
            width: dict[str, Any] = {"dynamic_ncols": True, "bar_format": BAR}
            self._bar = ProgressBar(total=total_steps, initial=first_step, file=self._stream, **width)

    def step(
        self, step: int, *, loss: float, lr: float, speed: Speed, memory: str, epoch: int, skipped: int = 0
    ) -> None:
        """Show that ``step`` steps are done, ``skipped`` of them skipped as non-finite. ``loss`` is the mean since the
        last call; ``memory`` has value, unit and kind, such as ``"0.52 GB host peak"``."""
        if not self._shown:
            return
        parts = {"epoch": f"epoch {epoch}", "loss": f"loss {loss:.4f}", "lr": f"lr {lr:.1e}"}
        speeds = {f"speed {place}": text for place, text in enumerate(speed.describe())}
        parts |= speeds | {"memory": f"memory {memory}"}
        parts |= {"trouble": f"{skipped} skipped step{'s' if skipped > 1 else ''}"} if skipped else {}
        counted = f"step {step}/{self._total_steps}{self._left(step)}"
        self._count(step, counted, parts, ["memory", "lr", *reversed(speeds), "epoch"])

    def count(self, done: int, total: int | None, text: str) -> None:
        """Show that ``done`` of ``total`` items are done, with a ``text``; ``total`` may change, or be unknown."""
        self._total_steps = total or 0
        if self._bar is not None:
            self._bar.total = total
        self._count(done, f"{done}/{total}" if total else f"{done}", {"text": text})
        if self._bar is not None:
            self._bar.refresh()

    def _count(self, done: int, counted: str, parts: Mapping[str, str], leave_out: Sequence[str] = ()) -> None:
        status_line.clear_status()
        if self._bar is not None:
            self._bar.fields, self._bar.drop_order = parts, leave_out
            self._bar.update(done - self._bar.n)
        elif self._shown:
            self._line(done, BETWEEN.join([counted, *parts.values()]))

    def _left(self, step: int) -> str:
        seconds, taken, others = self._clock() - self._began, step - self._first_step, self._total_steps - step
        known = seconds > 0 and taken > 0 and others > 0
        return f"{BETWEEN}{tqdm.format_interval(seconds / taken * others)} left" if known else ""

    def evaluation(self, step: int, split: str, result: dict[str, float]) -> None:
        """Show the metrics of an evaluation of ``split`` (val, test) after ``step``, above the bar."""
        parts = [f"{name} {format_metric(name, value, str(value))}" for name, value in result.items()]
        self.message(" · ".join([f"{split} after step {step}", *parts]))

    def message(self, text: str) -> None:
        """Show a line above the bar; also before ``start`` and after ``close``."""
        if self._shown:
            self._above(text)

    def notice(self, text: str) -> None:
        """Show an unusual event of the run, even if progress is disabled."""
        if self._rank == 0:
            self._above(text)

    def warning(self, text: str) -> None:
        """Show a warning on every rank, even if progress is disabled."""
        prefix = f"[rank {self._rank}] " if self._rank else ""
        self._above(f"{prefix}trainer: warning: {text}")

    def _above(self, text: str) -> None:
        if self._bar is not None:
            tqdm.write(escaped(text), file=self._stream)
        else:
            self._print(text)

    def close(self) -> None:
        """Show the last step and close the bar; may be called twice."""
        if self._pending is not None:
            self._print(self._pending)
        if self._bar is not None:
            self._bar.close()
        self._pending = self._bar = None

    def _line(self, step: int, text: str) -> None:
        if self._clock() >= self._next_line or step == self._total_steps:
            self._print(text)
            self._pending, self._next_line = None, self._clock() + LINE_INTERVAL
        else:
            self._pending = text

    def _print(self, text: str) -> None:
        print(escaped(text), file=self._stream, flush=True)


def _shows_a_bar(stream: TextIO) -> bool:
    """Return whether the stream is a terminal with a known width: tqdm draws nothing on one with 0 columns."""
    if not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # no file descriptor: tqdm uses its default width
        return True
