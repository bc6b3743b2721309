"""What a recipe needs and how fast it is on 1, 2, 4, ... devices, under each strategy and over several networks.

The batch stays what it is: more devices share it. Every row is a simulation of its own, with a process group of that
size. Only the micro-batch is guessed before it is simulated: from what grows with it in a simulation with a small one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trainer.engine.window import cut_at
from trainer.errors import RecipeError
from trainer.memory.plan import Plan, decide_plan
from trainer.planner.knobs import Settings, applied, left_open, micro_batch_sizes
from trainer.planner.network import Cluster, Interconnect, strategies
from trainer.planner.predict import Prediction, predict_here
from trainer.planner.search import MARGIN, WHOLE, Progress
from trainer.planner.target import Target, budget_bytes
from trainer.recipe import Recipe
from trainer.system.children import in_children

FIRST = 8
"""Samples of the micro-batch with which a row is simulated first, where the recipe leaves it open."""


@dataclass(frozen=True)
class ScaleRow:
    """One number of devices under one strategy.

    Args:
        cluster: the devices and their nodes.
        strategy: single, ddp, fsdp, hsdp, or ``fsdp*``, which keeps whole weights until backward.
        settings: of the recipe, to train so.
        samples: of a batch.
        plan: with its micro-batch; ``None`` where it was refused.
        found: the simulation; ``None`` where it was refused.
        budget: bytes that torch may take on each device.
        reason: why it was refused.
    """

    cluster: Cluster
    strategy: str
    settings: Settings = field(default_factory=dict)
    samples: int = 0
    plan: Plan | None = None
    found: Prediction | None = None
    budget: int = 0
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether its memory stays within the budget, with the margin."""
        return self.found is not None and self.found.reserved * (1 + MARGIN) <= self.budget

    def samples_per_second(self, network: str) -> float:
        """Of one device, over the interconnect of that name."""
        assert self.found is not None
        return 1e3 * self.samples / self.found.costs[network].step_ms / self.cluster.devices


@dataclass(frozen=True)
class ScaleReport:
    """The answer.

    Args:
        recipe: that was planned for, prepared.
        target: the GPU of every rank.
        networks: the interconnects that were compared.
        rows: by the number of devices, then by strategy; the first is one device.
        notes: what a person must know to read the figures.
        seconds: that it took.
    """

    recipe: Recipe
    target: Target
    networks: list[Interconnect]
    rows: list[ScaleRow]
    notes: list[str]
    seconds: float

    def efficiency(self, row: ScaleRow, network: str) -> float | None:
        """Samples a second of each device, as a part of those of one device alone."""
        alone = self.rows[0]
        if alone.found is None or row.found is None:
            return None
        return row.samples_per_second(network) / alone.samples_per_second(network)


class Scale:
    """The table of one recipe.

    Args:
        recipe: from :func:`trainer.planner.predict.prepared`.
        target: the GPU.
        sizes: from :func:`clusters`.
        networks: the interconnects to compare.
        progress: told after each simulation.

    Raises:
        RecipeError: for a knob that is left to the planner's search.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        sizes: Sequence[Cluster],
        networks: Sequence[Interconnect],
        progress: Progress | None = None,
    ) -> None:
        for name in left_open(recipe.memory):
            raise RecipeError(
                f"memory.{name}=auto is decided for one number of devices: plan that first (trainer plan ... --devices "
                f"{sizes[-1].devices}) and set what it says"
            )
        self.recipe, self.target, self.sizes, self.networks = recipe, target, sizes, list(networks)
        self.progress = progress or (lambda done, total, text: None)
        self.notes: dict[str, None] = {}

    def run(self) -> ScaleReport:
        """Simulate all rows, in rounds until each has its micro-batch."""
        began = time.perf_counter()
        rows = self._rows()
        tried: list[list[ScaleRow]] = [[row] if row.reason else [] for row in rows]
        done = 0
        while waiting := {at: row for at in range(len(rows)) if (row := self._next(rows[at], tried[at], tried[0]))}:
            places, jobs = list(waiting), list(waiting.values())
            for number, result in in_children([self._call(row) for row in jobs]):
                row = jobs[number]
                failed = isinstance(result, Exception)
                answer = {"reason": str(result).splitlines()[0]} if failed else {"found": Prediction.answered(result)}
                tried[places[number]].append(replace(row, **answer))
                done += 1
                total = max(done, sum(not one.reason for one in rows))
                self.progress(done, total, f"{row.strategy} on {row.cluster.devices}")
        best = [best_of(found) for found in tried]
        for row in best:
            self.notes |= dict.fromkeys(row.found.notes if row.found else ())
        seconds = time.perf_counter() - began
        return ScaleReport(self.recipe, self.target, self.networks, best, list(self.notes), seconds)

    def _call(self, row: ScaleRow) -> Callable[[], Any]:
        assert row.plan is not None
        nodes = row.cluster.nodes
        return partial(predict_here, self._recipe(row), row.plan, self.target, nodes, False, self.networks)

    def _recipe(self, row: ScaleRow) -> Recipe:
        return applied(self.recipe, row.settings)

    def _rows(self) -> list[ScaleRow]:
        """All rows, before anything is simulated; those that cannot work have their reason."""
        return [self._row(size, *named) for size in self.sizes for named in self._named(size)]

    def _named(self, size: Cluster) -> list[tuple[str, Settings]]:
        found = strategies(self.recipe.memory, size)
        return list(found.items()) if self._samples(size) >= size.devices else [("any", {})]

    def _samples(self, size: Cluster) -> int:
        """Samples of a batch: no more than there are."""
        return min(cut_at(self.recipe, size.devices, 0).batch_size, len(self.recipe.data.train))

    def _row(self, size: Cluster, name: str, settings: Settings) -> ScaleRow:
        samples = self._samples(size)
        budget = budget_bytes(self.recipe.memory.budget or WHOLE, self.target.gpu, size.devices)
        row = ScaleRow(size, name, settings, samples, budget=budget)
        if name == "any":
            return replace(row, reason=self._idle(size, samples))
        try:
            return replace(row, plan=decide_plan(applied(self.recipe, settings), size.devices))
        except RecipeError as error:
            return replace(row, reason=str(error).splitlines()[0])

    def _idle(self, size: Cluster, samples: int) -> str:
        idle = f"{size.devices - samples} of {size.devices} devices would have no samples"
        if samples == len(self.recipe.data.train):
            return f"the training set has {samples:,} samples: {idle}"
        return f"batch_size={samples}: {idle}; it takes --batch_size {size.devices} or more"

    def _next(self, row: ScaleRow, tried: Sequence[ScaleRow], alone: Sequence[ScaleRow]) -> ScaleRow | None:
        """The row with the micro-batch to simulate next; ``None`` when there is nothing to simulate, or not yet.

        Args:
            row: without a micro-batch.
            tried: what was simulated of it.
            alone: what was simulated of one device, which comes first: the others need little more than that.
        """
        sizes = [size for size in micro_batch_sizes(self._recipe(row), row.cluster.devices) if size is not None]
        if not sizes or any(one.found is None for one in tried):
            return None if tried else row
        if tried:
            wanted = guess(tried, sizes)
        elif row.cluster.devices == 1 or any(one.found is None for one in alone):
            wanted = next(size for size in sizes if size <= FIRST)
        elif alone:
            wanted = next((size for size in sizes if size <= expected(alone[-1])), next(s for s in sizes if s <= FIRST))
        else:
            return None
        return None if wanted is None else self._with(row, wanted)

    def _with(self, row: ScaleRow, size: int) -> ScaleRow:
        settings = row.settings | {"memory.micro_batch_size": size}
        plan = decide_plan(applied(self.recipe, settings), row.cluster.devices)
        return replace(row, settings=settings, plan=plan)


def guess(tried: Sequence[ScaleRow], sizes: Sequence[int]) -> int | None:
    """The micro-batch to simulate next; ``None`` if the largest that fits is found, or what was guessed fits."""
    fitting = [size_of(row) for row in tried if row.fits]
    failing = [size_of(row) for row in tried if not row.fits]
    left = [size for size in sizes if size > max(fitting, default=0) and size < min(failing, default=size + 1)]
    if not left or len(fitting) > 1:
        return None
    fewer = [size for size in left if size <= expected(tried[-1])]
    return max(fewer) if fewer else None if fitting else min(left)


def expected(row: ScaleRow) -> float:
    """Samples of the largest micro-batch that would fit, if all memory that is not constant grew with it."""
    assert row.found is not None
    room = row.budget / (1 + MARGIN) - (row.found.reserved - row.found.growing)
    return size_of(row) * room / max(1, row.found.growing)


def size_of(row: ScaleRow) -> int:
    """Samples of its micro-batch."""
    assert row.plan is not None
    return row.plan.first_cut.micro_batch_size


def best_of(tried: Sequence[ScaleRow]) -> ScaleRow:
    """The row with the largest micro-batch that fits; the smallest if none does."""
    known = [row for row in tried if row.found is not None]
    fitting = [row for row in known if row.fits]
    if fitting:
        return max(fitting, key=size_of)
    return min(known, key=size_of) if known else tried[-1]
