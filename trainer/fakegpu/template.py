"""Traces of any micro-batch size from the traces of two: the same records, with sizes that are affine in it.

    template = Template.between(small, large)  # traces with micro-batches of 4 and of 64 samples
    if template is not None:
        trace = template.at(template.sizes_at(16), skipped_micro_steps=2)

From two samples on, the operations of a step rarely depend on the size of its micro-batches. A template exists only if
both traces have the same records, and every size is on a line with integer coefficients that is not negative for one
sample: the line through two products of sizes that both grow is. What a kernel rounds is computed again
(:attr:`Trace.formulas`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trainer.fakegpu.events import Event, Trace, host_peak
from trainer.fakegpu.kernels import embedding_bytes

MIN_SAMPLES = 2  # tensors of one sample are broadcast, and count as contiguous


class NotAffine(Exception):
    """Raised when two traces do not decide the sizes of a third."""


class Line(NamedTuple):
    """The line through the sizes of two micro-batches, for a third between them."""

    first: int
    last: int
    samples: int

    @property
    def is_between(self) -> bool:
        least, most = sorted((self.first, self.last))
        return least <= self.samples <= most and (least == most or least >= MIN_SAMPLES)

    def through(self, small: int, large: int) -> int:
        """Return the size for ``samples``; a :class:`NotAffine` unless the line has integer coefficients."""
        if small == large:
            return small
        if self.first == self.last:
            raise NotAffine
        slope, rest = divmod(large - small, self.last - self.first)
        if rest or small < slope * (self.first - 1):  # less than nothing for one sample
            raise NotAffine
        return small + slope * (self.samples - self.first)


@dataclass(frozen=True)
class Template:
    """The traces of a run with smaller and with larger micro-batches, equal except for sizes."""

    small: Trace
    large: Trace

    @classmethod
    def between(cls, small: Trace, large: Trace) -> Template | None:
        """Return the template of two traces, or ``None`` if they differ in more than sizes, or a size is not affine.

        Their micro-batches must be marked (``Tracer.begin_batch``), and no branch may depend on a guessed value.
        """
        if small.guesses or large.guesses or not small.batches or _outline(small) != _outline(large):
            return None
        template = cls(small, large)
        return template if template.at([mark.samples for mark in large.batches]) is not None else None

    def sizes_at(self, micro_batch: int) -> list[int] | None:
        """Return the samples of all traced micro-batches, in proportion to the first; ``None`` if one is no integer.

        They are those of a run if ``micro_batch`` and the sizes of both traces divide its batch.
        """
        first = Line(self.small.batches[0].samples, self.large.batches[0].samples, micro_batch)
        pairs = zip(self.small.batches, self.large.batches, strict=True)
        try:
            return [first.through(one.samples, other.samples) for one, other in pairs]
        except NotAffine:
            return None

    def at(self, sizes: Sequence[int], skipped_micro_steps: int = 0) -> Trace | None:
        """Return the trace of micro-batches of ``sizes``, or ``None`` if the two traces do not decide it.

        Each size must lie between those of the traces, because kernels have thresholds: what does not
        differ between two sizes does not differ for any between them.
        """
        try:
            return replace(self._at(sizes), skipped_micro_steps=skipped_micro_steps)
        except NotAffine:
            return None

    def _at(self, sizes: Sequence[int]) -> Trace:
        small, large = self.small, self.large
        if len(sizes) != len(small.batches):
            raise NotAffine
        marks = [mark._replace(samples=size) for mark, size in zip(small.batches, sizes, strict=True)]
        spans = zip(small.batches, large.batches, sizes, strict=True)
        lines = [Line(one.samples, other.samples, size) for one, other, size in spans]
        if not all(line.is_between for line in lines):
            raise NotAffine
        on_device = _Lines(lines, [mark.event for mark in marks])
        on_host = _Lines(lines, [mark.host_event for mark in marks])
        of_work = _Lines(lines, [mark.operation for mark in marks])
        formulas = {
            at: tuple(on_device.value(at, *pair) for pair in zip(values, large.formulas[at], strict=True))
            for at, values in small.formulas.items()
        }
        events = on_device.sized(_exact(small, formulas), _exact(large, formulas), "bytes")
        host_events = on_host.sized(small.host_events, large.host_events, "bytes")
        return replace(
            small,
            events=events,
            host_events=host_events,
            host_bytes=host_peak(host_events),
            work=of_work.sized(of_work.sized(small.work, large.work, "flops"), large.work, "bytes"),
            batches=marks,
            formulas=formulas,
        )


def _exact(trace: Trace, formulas: Mapping[int, Sequence[int]]) -> list[Event]:
    """Return the events of ``trace`` with the sizes that ``formulas`` give, which are on no line."""
    events = [*trace.events]
    for at, values in formulas.items():
        before, sizes = ([size for size in embedding_bytes(*v) if size] for v in (trace.formulas[at], values))
        if len(before) != len(sizes):
            raise NotAffine
        events[at : at + len(sizes)] = [events[at + n]._replace(bytes=size) for n, size in enumerate(sizes)]
    return events


class _Lines(NamedTuple):
    """The line of each micro-batch, and the index of the first record that it decides."""

    lines: list[Line]
    starts: list[int]

    def value(self, at: int, small: int, large: int) -> int:
        """Return a size of the record at index ``at``."""
        if small == large:
            return small
        if not (before := bisect_right(self.starts, at)):
            raise NotAffine
        return self.lines[before - 1].through(small, large)

    def sized(self, small: Sequence[Any], large: Sequence[Any], name: str) -> list[Any]:
        """Return the records of ``small`` with the third micro-batch's sizes in the field ``name``."""
        pairs = enumerate((getattr(a, name), getattr(b, name)) for a, b in zip(small, large, strict=True))
        values = [low if low == high else self.value(at, low, high) for at, (low, high) in pairs]
        return [
            one if getattr(one, name) == value else one._replace(**{name: value})
            for one, value in zip(small, values, strict=True)
        ]


def _outline(trace: Trace) -> list[Any]:
    """Return everything but sizes."""
    events = [[one._replace(bytes=bool(one.bytes)) for one in part] for part in (trace.events, trace.host_events)]
    work = [one._replace(flops=bool(one.flops), bytes=bool(one.bytes)) for one in trace.work]
    marks = [mark._replace(samples=0) for mark in trace.batches]
    others = (trace.categories, trace.marks, trace.micro_steps, [*trace.formulas], trace.notes, trace.attention)
    return [*events, work, marks, *others]
