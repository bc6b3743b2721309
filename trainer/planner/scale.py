"""Memory and speed of a recipe on 1, 2, 4, ... devices, with each strategy and over several networks.

The batch stays the same and is shared by more devices. Each row is a separate simulation with a process group of that
size. Only the micro-batch size is estimated first, from the memory that grows with it in a simulation of a small one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from trainer.engine.cut import cut_at
from trainer.errors import RecipeError
from trainer.fakegpu.cost import ESTIMATES, StepCost
from trainer.fakegpu.gpus import non_allocator_bytes
from trainer.fakegpu.network import Cluster, Interconnect
from trainer.fakegpu.peaks import in_gb
from trainer.fakegpu.prediction import Prediction
from trainer.fakegpu.target import Target, budget_bytes, reduced_budget_note
from trainer.memory.plan import Plan, decide_plan, with_precision
from trainer.planner.knobs import Settings, apply_settings, micro_batch_sizes, strategies, undecided_knobs
from trainer.planner.predict import predict_in_process
from trainer.planner.search import BUDGET_MARGIN, DEFAULT_BUDGET, Progress
from trainer.planner.synthetic_data import data_notes
from trainer.recipe import Recipe
from trainer.system.child_jobs import run_in_children
from trainer.system.text import GB, align_columns, as_text, format_bytes

FIRST = 8  # samples of the micro-batch in the first simulation of a row, if the recipe leaves it open


@dataclass(frozen=True)
class ScaleRow:
    """One number of devices under one strategy."""

    cluster: Cluster  # the devices and their nodes
    strategy: str  # single, ddp, fsdp, hsdp, or ``fsdp*``, which keeps whole weights until backward
    settings: Settings = field(default_factory=dict)  # settings of the recipe for this row
    samples: int = 0  # samples per batch
    plan: Plan | None = None  # with its micro-batch; ``None`` if it was rejected
    prediction: Prediction | None = None  # the simulation; ``None`` if it was rejected
    budget: int = 0  # maximum bytes for torch on each device
    reason: str = ""  # why it was rejected

    @property
    def runs(self) -> bool:
        """Whether it stays within the budget and margin, if needed after allocator retries, which the table names."""
        return self.prediction is not None and self.prediction.retries is not None

    def step_ms(self, network: str) -> float:
        """Return the milliseconds of a step over the interconnect ``network``."""
        assert self.prediction is not None
        return self.prediction.costs[network].step_ms

    def samples_per_second(self, network: str) -> float:
        """Return the samples per second and device over the interconnect ``network``."""
        return 1e3 * self.samples / self.step_ms(network) / self.cluster.devices


@dataclass(frozen=True)
class ScaleReport:
    """The result of :class:`ScaleSearch`."""

    recipe: Recipe  # the prepared recipe
    target: Target  # the GPU of every rank
    networks: list[Interconnect]  # the compared interconnects
    rows: list[ScaleRow]  # by the number of devices, then by strategy; the first is one device
    notes: list[str]  # how to read the values
    seconds: float  # duration of the simulations

    def efficiency(self, row: ScaleRow, network: str) -> float | None:
        """Return the samples per second and device, relative to a single device."""
        alone = self.rows[0]
        if alone.prediction is None or row.prediction is None:
            return None
        return row.samples_per_second(network) / alone.samples_per_second(network)


@dataclass
class ScaleSearch:
    """The scaling table of one recipe; a ``RecipeError`` if the recipe leaves a knob to the planner's search."""

    recipe: Recipe  # from :func:`trainer.planner.predict.prepare_recipe`
    target: Target  # the GPU
    sizes: Sequence[Cluster]  # from :func:`trainer.fakegpu.network.clusters`
    networks: Sequence[Interconnect]  # the interconnects to compare
    progress: Progress = lambda done, total, text: None  # called after each simulation

    def __post_init__(self) -> None:
        self.recipe = with_precision(self.recipe, self.target.gpu.capability)
        for name in undecided_knobs(self.recipe.memory):
            fix = f"use the value that trainer plan ... --devices {self.sizes[-1].devices} chooses"
            raise RecipeError(f"memory.{name}=auto is decided for one number of devices: {fix}")

    def run(self) -> ScaleReport:
        """Simulate all rows, in rounds, until each has its micro-batch size."""
        began = time.perf_counter()
        rows = [row for size in self.sizes for row in self._rows(size)]
        tried: list[list[ScaleRow]] = [[row] if row.reason else [] for row in rows]
        done = 0
        while waiting := [(at, new) for at, row in enumerate(rows) if (new := self._next(row, tried[at], tried[0]))]:
            for number, result in run_in_children([self._call(row) for _, row in waiting]):
                at, row = waiting[number]
                if isinstance(result, Exception):
                    row = replace(row, reason=str(result).splitlines()[0])
                else:
                    row = replace(row, prediction=Prediction.from_child(result))
                tried[at].append(row)
                done += 1
                total = max(done, sum(not one.reason for one in rows))
                self.progress(done, total, f"{row.strategy} on {row.cluster.devices}")
        best = [best_of(found) for found in tried]
        cut = reduced_budget_note(self.recipe.memory.budget, self.target.gpu, self.sizes[-1].devices)
        notes = dict.fromkeys([*cut, *data_notes(self.recipe.data)])
        notes |= dict.fromkeys(note for row in best if row.prediction for note in row.prediction.notes)
        seconds = time.perf_counter() - began
        return ScaleReport(self.recipe, self.target, list(self.networks), best, list(notes), seconds)

    def _call(self, row: ScaleRow) -> Callable[[], Any]:
        assert row.plan is not None
        recipe, capacity = apply_settings(self.recipe, row.settings), int(row.budget / (1 + BUDGET_MARGIN))
        how = (self.target, row.cluster.nodes, False, self.networks, capacity)
        return partial(predict_in_process, recipe, row.plan, *how)

    def _rows(self, size: Cluster) -> list[ScaleRow]:
        """Return a row per strategy, not simulated yet; those that cannot work have a reason."""
        count = len(self.recipe.data.train)
        samples = min(cut_at(self.recipe, size.devices, 0).batch_size, count)
        budget = budget_bytes(self.recipe.memory.budget or DEFAULT_BUDGET, self.target.gpu, size.devices)
        copies = self.recipe.memory.tensor_parallel
        if samples * copies < size.devices:
            idle = f"{size.devices - samples * copies} of {size.devices} devices would have no samples"
            reason = f"batch_size={samples}: {idle}: give --batch_size {size.devices // copies} or more"
            if samples == count:
                reason = f"the training set has {samples:,} samples: {idle}"
            return [ScaleRow(size, "any", {}, samples, budget=budget, reason=reason)]
        rows = []
        for name, settings in strategies(self.recipe.memory, size).items():
            row = ScaleRow(size, name, settings, samples, budget=budget)
            try:
                rows.append(self._planned(row, settings))
            except RecipeError as error:
                rows.append(replace(row, reason=str(error).splitlines()[0]))
        return rows

    def _planned(self, row: ScaleRow, settings: Settings) -> ScaleRow:
        plan = decide_plan(apply_settings(self.recipe, settings), row.cluster.devices)
        return replace(row, settings=settings, plan=plan)

    def _next(self, row: ScaleRow, tried: Sequence[ScaleRow], alone: Sequence[ScaleRow]) -> ScaleRow | None:
        """Return the next row to simulate, after ``tried`` and the rows of one device (``alone``); ``None`` if done."""
        recipe = apply_settings(self.recipe, row.settings)
        sizes = [size for size in micro_batch_sizes(recipe, row.cluster.devices) if size is not None]
        if not sizes or any(one.prediction is None for one in tried):
            return None if tried else row
        small = next(size for size in sizes if size <= FIRST)
        if tried:
            wanted = guess(tried, sizes)
        elif row.cluster.devices == 1 or any(one.prediction is None for one in alone):
            wanted = small
        elif alone:
            wanted = next((size for size in sizes if size <= expected(alone[-1])), small)
        else:
            return None
        return None if wanted is None else self._planned(row, row.settings | {"memory.micro_batch_size": wanted})


def guess(tried: Sequence[ScaleRow], sizes: Sequence[int]) -> int | None:
    """Return the next micro-batch size to simulate; ``None`` if the largest that fits is known, or a guess fits."""
    fitting = [size_of(row) for row in tried if row.runs]
    failing = [size_of(row) for row in tried if not row.runs]
    left = [size for size in sizes if size > max(fitting, default=0) and size < min(failing, default=size + 1)]
    if not left or len(fitting) > 1:
        return None
    fewer = [size for size in left if size <= expected(tried[-1])]
    return max(fewer) if fewer else None if fitting else min(left)


def expected(row: ScaleRow) -> float:
    """Estimate the largest micro-batch that fits, as if all growing memory were proportional to its samples."""
    assert row.prediction is not None
    room = row.budget / (1 + BUDGET_MARGIN) - (row.prediction.reserved - row.prediction.per_sample_bytes)
    return size_of(row) * room / max(1, row.prediction.per_sample_bytes)


def size_of(row: ScaleRow) -> int:
    assert row.plan is not None
    return row.plan.initial_cut.micro_batch_size


def best_of(tried: Sequence[ScaleRow]) -> ScaleRow:
    """Return the row with the largest micro-batch that fits; the smallest if none does."""
    known = [row for row in tried if row.prediction is not None]
    fitting = [row for row in known if row.runs]
    return max(fitting, key=size_of) if fitting else min(known, key=size_of, default=tried[-1])


LEFT = ("strategy", "fits")
EQUAL = 0.01  # relative difference of times considered equal: the first strategy in the table wins
ASSUMED = (
    f"memory is simulated with a process group of that size; times are {ESTIMATES}",
    "large collectives reach 80 % of the data sheet's bandwidth over NVLink, PCIe and RDMA, and 60 % over TCP; a ring "
    "enters and leaves each node once; no switch is shared with other jobs, and all ranks are equally fast",
    "data loading never delays a step; the CPU launches each operation separately, without compiling",
)
SIGNS = {
    "fsdp*": "fsdp* keeps whole weights until backward: memory.reshard_after_forward false",
    "hsdp": "hsdp shards within each node, with one replica per node: memory.replicas",
    "retries": "retries: it fits only after allocator retries: torch must release its cache, which takes time",
}


def heading(report: ScaleReport) -> list[tuple[str, str]]:
    """Return the heading of the table, as labels and texts."""
    gpu, rows = report.target.gpu, report.rows
    one, last = rows[0], rows[-1]
    own = f"{gpu.title} of {format_bytes(gpu.memory)}; {format_bytes(last.budget)} for torch"
    own += f", {100 * BUDGET_MARGIN:g} % kept free"
    beside = format_bytes(non_allocator_bytes(gpu, last.cluster.devices))
    differ = " on one device" if len({row.samples for row in rows}) > 1 else ""
    return [
        ("batch", f"{one.samples:,} samples per step{differ}, {report.recipe.memory.precision}"),
        ("devices", f"{own}; {beside} outside on {last.cluster.devices} devices"),
        *((net.name, f"{net.describe_inter_node}; within {net.describe_intra_node}") for net in report.networks),
    ]


def table(report: ScaleReport) -> str:
    """Format one line per number of devices and strategy, with the times over each interconnect."""
    names = ["devices", "nodes", "strategy", "micro-batch", "reserved", "fits", "GB sent", "a node"]
    names += [name for network in report.networks for name in (f"ms {network.name}", "eff.")]
    text = align_columns(names, [_cells(row, report) for row in report.rows if row.prediction is not None], LEFT)
    return "\n".join([text, *(note for name, note in SIGNS.items() if f" {name} " in text)])


def _cells(row: ScaleRow, report: ScaleReport) -> list[str]:
    found, plan = row.prediction, row.plan
    assert found is not None
    assert plan is not None
    fits = "retries" if found.retries else "yes" if found.fits else "no"
    cells = [str(row.cluster.devices), str(row.cluster.nodes), row.strategy]
    cells += [f"{plan.initial_cut.accumulate} × {size_of(row)}", format_bytes(found.reserved), fits]
    cells += [_short(sum(found.traffic.values()) / GB), _short(found.leaving / GB)]
    for network in report.networks:
        efficiency = report.efficiency(row, network.name)
        cells += [f"{row.step_ms(network.name):,.1f}", "" if efficiency is None else f"{100 * efficiency:.0f} %"]
    return cells


def _short(number: float) -> str:
    return "0" if not number else f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"


def fastest(rows: Sequence[ScaleRow], network: str) -> ScaleRow | None:
    """Return the fastest row that fits; the first of equally fast ones."""
    fitting = [row for row in rows if row.runs]
    least = min((row.step_ms(network) for row in fitting), default=0.0)
    return next((row for row in fitting if row.step_ms(network) <= least * (1 + EQUAL)), None)


def summary_text(report: ScaleReport, network: str) -> str:
    """Summarize one interconnect: the fastest strategy by devices, what does not fit, and the shortest step."""
    sizes = list(dict.fromkeys(row.cluster.devices for row in report.rows if row.prediction is not None))
    best = {size: fastest([row for row in report.rows if row.cluster.devices == size], network) for size in sizes}
    parts = [_runs({size: row.strategy if row else "nothing" for size, row in best.items() if size > 1})]
    parts += _not_fitting(report.rows)
    known = [row for row in best.values() if row is not None]
    if row := fastest(known, network):  # on the fewest devices
        efficiency = report.efficiency(row, network)
        worth = "" if efficiency is None else f" at {100 * efficiency:.0f} % efficiency"
        more = "" if row is known[-1] else ", and more devices do not shorten it"
        shortest = f"the shortest step is {row.strategy}'s on {row.cluster.devices}, {row.step_ms(network):,.1f} ms"
        parts.append(f"{shortest}{worth}{more}")
    return f"over {network}: " + "; ".join(part for part in parts if part)


def _runs(winners: dict[int, str]) -> str:
    runs = [(name, list(sizes)) for name, sizes in groupby(winners, key=winners.__getitem__)]
    texts = []
    for number, (name, own) in enumerate(runs):
        verb = "" if number else " fits" if name == "nothing" else " is fastest"
        until_the_end = number == len(runs) - 1 and len(own) > 1
        where = f"from {own[0]} devices on" if until_the_end else f"on {own[0]}" + f" to {own[-1]}" * (len(own) > 1)
        texts.append(f"{name}{verb} {where}")
    return ", ".join(texts)


def _not_fitting(rows: Sequence[ScaleRow]) -> list[str]:
    found = []
    for name in dict.fromkeys(row.strategy for row in rows if row.prediction is not None and not row.runs):
        own = [(row, row.prediction.reserved) for row in rows if row.strategy == name and row.prediction is not None]
        unfit = [(row, reserved) for row, reserved in own if not row.runs]
        least = min(reserved for _, reserved in unfit)
        where = "" if len(unfit) == len(own) > 1 else " on " + ", ".join(str(row.cluster.devices) for row, _ in unfit)
        found.append(f"{name} does not fit{where} (it takes at least {format_bytes(least)})")
    return found


def refused(report: ScaleReport) -> list[str]:
    """Return a line per reason why rows could not be simulated."""
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        if row.prediction is None:
            devices = row.cluster.devices
            name = f"{devices} devices" if row.strategy == "any" else f"{row.strategy} on {devices}"
            reasons.setdefault(row.reason, []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def to_json(report: ScaleReport) -> dict[str, Any]:
    """Return the content of ``scale.json``; memory and traffic in GB (1e9 bytes)."""
    return {
        "device": report.target.gpu.title,
        "margin": BUDGET_MARGIN,
        "interconnects": {network.name: network.to_json() for network in report.networks},
        "rows": [_row_to_json(row, report) for row in report.rows],
        "verdicts": {network.name: summary_text(report, network.name) for network in report.networks},
        "assumed": list(ASSUMED),
        "notes": report.notes,
        "seconds": round(report.seconds, 1),
    }


def _row_to_json(row: ScaleRow, report: ScaleReport) -> dict[str, Any]:
    found = row.prediction
    fields: dict[str, Any] = {
        "devices": row.cluster.devices,
        "nodes": row.cluster.nodes,
        "strategy": row.strategy,
        "flags": " ".join(f"--{key} {as_text(value)}" for key, value in row.settings.items()),
        "samples": row.samples,
        "plan": row.plan and row.plan.describe(),
        "budget_gb": in_gb(row.budget),
        "fits": found is not None and found.fits,
        "retries": found and found.retries,
        "reason": row.reason,
    }
    if found is None:
        return fields
    return fields | {
        **{f"predicted_{name}_gb": in_gb(getattr(found, name)) for name in ("allocated", "reserved", "host")},
        "sent_gb": {op: round(size / GB, 6) for op, size in found.traffic.items()},
        "leaving_a_node_gb": round(found.leaving / GB, 6),
        "over": {name: _cost_to_json(row, report, name, cost) for name, cost in found.costs.items()},
    }


def _cost_to_json(row: ScaleRow, report: ScaleReport, network: str, cost: StepCost) -> dict[str, float | None]:
    efficiency = report.efficiency(row, network)
    return {
        "step_ms": round(cost.step_ms, 3),
        "compute_ms": round(cost.alone_ms, 3),
        "communication_ms": round(cost.communication_ms, 3),
        "exposed_ms": round(cost.exposed_ms, 3),
        "samples_per_second_and_device": round(row.samples_per_second(network), 4),
        "efficiency": None if efficiency is None else round(efficiency, 4),
    }
