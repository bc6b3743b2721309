"""A table of scale as a person reads it, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainer.planner.gpus import outside
from trainer.planner.network import Interconnect
from trainer.planner.report import as_text, gigabytes
from trainer.planner.scale import ScaleReport, ScaleRow
from trainer.planner.search import MARGIN
from trainer.system.text import GB, columns

LEFT = ("strategy", "fits")
EQUAL = 0.01
"""Difference of two times that is none: the strategy that is named first in the table is taken."""

ASSUMED = (
    "memory is simulated with a process group of that size; times are estimates, for the order of the rows",
    "large collectives reach 80 % of a data sheet's bandwidth over NVLink, PCIe and RDMA, and 60 % over TCP; a ring "
    "enters and leaves each node once; no switch is shared with others, no rank is slower than the rest",
    "nothing waits for data; the CPU launches each operation by itself, without compiling",
)
KEPT = "fsdp* keeps whole weights until backward: memory.reshard_after_forward false"
HYBRID = "hsdp shards within each node, and has as many replicas as nodes: memory.replicas"


def heading(report: ScaleReport) -> list[tuple[str, str]]:
    """What the table is about, as labels and texts."""
    gpu, rows = report.target.gpu, report.rows
    own = (
        f"{gpu.title} of {gigabytes(gpu.memory)}; {gigabytes(rows[-1].budget)} for torch, {100 * MARGIN:g} % stay free"
    )
    beside = gigabytes(outside(gpu, rows[-1].cluster.devices))
    found = [("batch", f"{rows[0].samples:,} samples a step, {report.recipe.memory.precision}")]
    if len({row.samples for row in rows}) > 1:
        found = [("batch", f"{rows[0].samples:,} samples a step on one device, {report.recipe.memory.precision}")]
    found.append(("devices", f"{own}; {beside} outside on {rows[-1].cluster.devices} devices"))
    found += [(network.name, described(network)) for network in report.networks]
    return found


def described(network: Interconnect) -> str:
    """An interconnect in words."""
    within, between = network.within, network.between
    return (
        f"{between.title}, {between.bandwidth / 1e9:.3g} GB/s a node, {1e6 * between.latency:g} µs a hop; within "
        f"{within.title}, {within.bandwidth / 1e9:.3g} GB/s a GPU"
    )


def table(report: ScaleReport) -> str:
    """One line for each number of devices and strategy, with the times over each interconnect."""
    names = ["devices", "nodes", "strategy", "micro-batch", "GB", "fits", "GB sent", "a node"]
    names += [name for network in report.networks for name in (f"ms {network.name}", "eff.")]
    text = columns(names, [_cells(row, report) for row in report.rows if row.found is not None], LEFT)
    shown = {row.strategy for row in report.rows}
    return "\n".join([text, *(note for name, note in (("fsdp*", KEPT), ("hsdp", HYBRID)) if name in shown)])


def _cells(row: ScaleRow, report: ScaleReport) -> list[str]:
    found, nodes = row.found, row.cluster.nodes
    assert found is not None
    assert row.plan is not None
    cut = row.plan.first_cut
    cells = [
        f"{row.cluster.devices}",
        f"{nodes}",
        row.strategy,
        f"{cut.accumulate} × {cut.micro_batch_size}",
        f"{found.reserved / GB:.2f}",
        "yes" if row.fits else "no",
        _short(found.sent / GB),
        _short(found.leaving / GB),
    ]
    for network in report.networks:
        efficiency = report.efficiency(row, network.name)
        cells.append(f"{found.costs[network.name].step_ms:,.1f}")
        cells.append("" if efficiency is None else f"{100 * efficiency:.0f} %")
    return cells


def _short(number: float) -> str:
    """Three digits, without an exponent."""
    return "0" if not number else f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"


def fastest(rows: Sequence[ScaleRow], network: str) -> ScaleRow | None:
    """The fastest row that fits; of equal ones the first."""
    fitting = [(row, row.found.costs[network].step_ms) for row in rows if row.found is not None and row.fits]
    if not fitting:
        return None
    least = min(step for _, step in fitting)
    return next(row for row, step in fitting if step <= least * (1 + EQUAL))


def verdict(report: ScaleReport, network: str) -> str:
    """From where on which strategy is the fastest over an interconnect, what does not fit, and what more devices do."""
    sizes = list(dict.fromkeys(row.cluster.devices for row in report.rows if row.found is not None))
    best = {size: fastest([row for row in report.rows if row.cluster.devices == size], network) for size in sizes}
    parts = [_runs({size: row.strategy if row else "nothing" for size, row in best.items() if size > 1})]
    parts += _not_fitting(report.rows)
    known = [row for row in best.values() if row is not None and row.found is not None]
    if known:
        parts.append(_best_size(report, known, network))
    return f"over {network}: " + "; ".join(part for part in parts if part)


def _runs(winners: dict[int, str]) -> str:
    """Such as "ddp is fastest on 2 to 8 devices, hsdp from 64 on"."""
    sizes = list(winners)
    runs: list[tuple[str, list[int]]] = []
    for size in sizes:
        if runs and runs[-1][0] == winners[size]:
            runs[-1][1].append(size)
        else:
            runs.append((winners[size], [size]))
    texts = []
    for number, (name, own) in enumerate(runs):
        verb = "" if number else " fits" if name == "nothing" else " is fastest"
        until_the_end = number == len(runs) - 1 and len(own) > 1
        where = f"from {own[0]} devices on" if until_the_end else f"on {own[0]}" + f" to {own[-1]}" * (len(own) > 1)
        texts.append(f"{name}{verb} {where}")
    return ", ".join(texts)


def _not_fitting(rows: Sequence[ScaleRow]) -> list[str]:
    """Such as "ddp does not fit on 2, 4"."""
    found = []
    for name in dict.fromkeys(row.strategy for row in rows if row.found is not None and not row.fits):
        own = [row for row in rows if row.strategy == name and row.found is not None]
        unfit = [row for row in own if not row.fits]
        least = min(row.found.reserved for row in unfit if row.found is not None)
        where = "" if len(unfit) == len(own) > 1 else " on " + ", ".join(str(row.cluster.devices) for row in unfit)
        found.append(f"{name} does not fit{where} (it takes at least {gigabytes(least)})")
    return found


def _best_size(report: ScaleReport, best: Sequence[ScaleRow], network: str) -> str:
    """The fewest devices with the shortest step, among the fastest rows of each size."""
    times = [(row, row.found.costs[network].step_ms) for row in best if row.found is not None]
    least = min(step for _, step in times)
    row, step = next((row, step) for row, step in times if step <= least * (1 + EQUAL))
    efficiency = report.efficiency(row, network)
    worth = "" if efficiency is None else f" at {100 * efficiency:.0f} % efficiency"
    more = "" if row is best[-1] else ", and more devices do not shorten it"
    return f"the shortest step is {row.strategy}'s on {row.cluster.devices}, {step:,.1f} ms{worth}{more}"


def refused(report: ScaleReport) -> list[str]:
    """What could not be simulated, and why; a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        if row.found is None:
            name = (
                f"{row.cluster.devices} devices"
                if row.strategy == "any"
                else f"{row.strategy} on {row.cluster.devices}"
            )
            reasons.setdefault(row.reason, []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def to_json(report: ScaleReport) -> dict[str, Any]:
    """What ``scale.json`` holds; memory and traffic in GB (1e9 bytes)."""
    return {
        "device": report.target.gpu.title,
        "margin": MARGIN,
        "interconnects": {
            network.name: {
                "within": network.within.title,
                "within_gb_s": network.within.bandwidth / 1e9,
                "between": network.between.title,
                "between_gb_s": network.between.bandwidth / 1e9,
                "within_hop_us": round(1e6 * network.within.latency, 3),
                "between_hop_us": round(1e6 * network.between.latency, 3),
            }
            for network in report.networks
        },
        "rows": [_row_to_json(row, report) for row in report.rows],
        "verdicts": {network.name: verdict(report, network.name) for network in report.networks},
        "assumed": list(ASSUMED),
        "notes": report.notes,
        "seconds": round(report.seconds, 1),
    }


def _row_to_json(row: ScaleRow, report: ScaleReport) -> dict[str, Any]:
    found = row.found
    fields: dict[str, Any] = {
        "devices": row.cluster.devices,
        "nodes": row.cluster.nodes,
        "strategy": row.strategy,
        "flags": " ".join(f"--{key} {as_text(value)}" for key, value in row.settings.items()),
        "samples": row.samples,
        "plan": row.plan and row.plan.describe(),
        "budget_gb": round(row.budget / GB, 4),
        "fits": row.fits,
        "reason": row.reason,
    }
    if found is None:
        return fields
    return fields | {
        "predicted_allocated_gb": round(found.allocated / GB, 4),
        "predicted_reserved_gb": round(found.reserved / GB, 4),
        "predicted_host_gb": round(found.host / GB, 4),
        "sent_gb": {op: round(size / GB, 6) for op, size in found.traffic.items()},
        "leaving_a_node_gb": round(found.leaving / GB, 6),
        "over": {name: _cost_to_json(row, report, name) for name in found.costs},
    }


def _cost_to_json(row: ScaleRow, report: ScaleReport, network: str) -> dict[str, float | None]:
    assert row.found is not None
    cost, efficiency = row.found.costs[network], report.efficiency(row, network)
    return {
        "step_ms": round(cost.step_ms, 3),
        "compute_ms": round(cost.alone_ms, 3),
        "communication_ms": round(cost.communication_ms, 3),
        "exposed_ms": round(cost.exposed_ms, 3),
        "samples_per_second_and_device": round(row.samples_per_second(network), 4),
        "efficiency": None if efficiency is None else round(efficiency, 4),
    }
