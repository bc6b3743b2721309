"""Does the search find the best of all plans? Complete grids of traces of two recipes, against brute force.

``python benchmarks/planner_grid.py``: 20 minutes of CPU. Every combination of settings is traced with every
micro-batch. Then searches with 18 budgets each get these traces instead of new ones. Retries of the allocator are left
out: what reserves more than the budget does not fit.
"""

from __future__ import annotations

import dataclasses
from math import inf
from statistics import mean
from typing import Any

from common import Record, table

from trainer.commands.recipes import load_recipe
from trainer.planner import knobs
from trainer.planner import search as searching
from trainer.planner.predict import predict_in_process
from trainer.planner.search import BUDGET_MARGIN, Search, search_for, with_size
from trainer.system.child_jobs import run_in_children

Search._smaller_at_a_loss = lambda search, candidates: []  # type: ignore[method-assign] # it only explains
RECIPES = {"vit_digits": 1, "lm_bytes": 2}
"""Devices of each recipe."""
GPU, BUDGETS = "a100-80gb", 18


def key(memory: Any) -> str:
    return repr(dataclasses.replace(memory, budget=None, expandable_segments=None))


def grid(search: Search) -> dict[str, Any]:
    """Trace every plan; what is rejected is left out."""
    sizes = knobs.micro_batch_sizes(search.recipe, search.devices)
    settings = knobs.combinations(search.recipe, search.devices, True, search.nodes)
    search.padding = search._padding(sizes)
    arms = [arm for one in settings for arm in search._arms(one, sizes)]
    found = [search._job(with_size(arm.settings, size)) for arm in arms for size in arm.micro_batch_sizes]
    jobs = [job for job in found if isinstance(job, tuple)]
    memories = [key(call.args[0].memory) for call, _ in jobs]
    traces = dict(run_in_children([call for call, _ in jobs], 1))
    return {memories[number]: result for number, result in traces.items()}


def compared(search: Search, known: dict[str, Any], budget: int) -> dict[str, Any]:
    """Search with ``budget`` bytes, and find the best plan of the grid."""
    asked = []

    def answer(recipe: Any, plan: Any, capacity: float = inf, **_: Any) -> Any:
        result = known[key(recipe.memory)]
        asked.append(plan)
        if isinstance(result, Exception):
            raise result
        return result | {"retries": 0 if result["reserved"] <= capacity else None}

    searching.predict_in_process = answer  # type: ignore[assignment]
    run_children, run_child = searching.run_in_children, searching.run_in_child
    searching.run_in_children = lambda calls: enumerate(call() for call in calls)  # type: ignore[assignment]
    searching.run_in_child = lambda call: call()  # type: ignore[assignment]
    try:
        report = Search(search.recipe, search.target, search.devices, 1, f"{budget}B").run()
    finally:
        searching.predict_in_process = predict_in_process
        searching.run_in_children, searching.run_in_child = run_children, run_child
    fits = [one for one in known.values() if isinstance(one, dict) and one["reserved"] * (1 + BUDGET_MARGIN) <= budget]
    best = min((next(iter(one["costs"].values()))["step_ms"] for one in fits), default=None)
    chosen = report.chosen and report.chosen.step_ms
    row = {"budget": budget, "traces": len(asked), "best_ms": best, "chosen_ms": chosen}
    return row | {"slower": chosen / best - 1 if chosen and best else 0.0, "wrong": (chosen is None) != (best is None)}


def main() -> None:
    """Compare each recipe, print a table and write the results."""
    record, rows, plans, cells = Record("planner_grid", {"gpu": GPU, "recipes": RECIPES}), {}, {}, []
    for name, devices in RECIPES.items():
        recipe = load_recipe(name)[0]
        free = recipe.replace(memory=dataclasses.replace(recipe.memory, micro_batch_size="auto"))
        search = search_for(free, GPU, devices, 1, "100%")
        known = grid(search)
        sizes = sorted(one["reserved"] for one in known.values() if isinstance(one, dict))
        low, high = 0.98 * sizes[0], 1.1 * (1 + BUDGET_MARGIN) * sizes[-1]
        steps = [low * (high / low) ** (step / (BUDGETS - 1)) for step in range(BUDGETS)]
        rows[name] = [compared(search, known, int(budget)) for budget in steps]
        plans[name] = len(known)
        record.write(rows=rows, plans=plans)
        of = rows[name]
        worst, counts = max(row["slower"] for row in of), [row["traces"] for row in of]
        wrong = sum(row["wrong"] for row in of)
        row = (name, len(known), f"{100 * worst:.2f} %", wrong, f"{mean(counts):.1f}", max(counts))
        cells.append([str(value) for value in row])
    record.write(True)
    print(table(["recipe", "plans", "slower than the best", "wrong answers", "traces, mean", "most"], cells))


if __name__ == "__main__":
    main()
