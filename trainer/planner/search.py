"""The fastest plan that fits: every sensible combination of knobs is predicted, and the best is predicted again.

The memory and the time of a micro-step are nearly affine in the size of the micro-batch, so a combination is traced
with the smallest and the largest, and those in between lie between them. What was chosen so is then traced itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from trainer.engine.window import cut_at
from trainer.errors import RecipeError, require
from trainer.memory.knobs import FOLLOWERS
from trainer.memory.plan import CUT_MATTERS, Plan, decide_plan
from trainer.planner import knobs
from trainer.planner.gpus import GPU, GPUS, gpu_named, host_as_device, nccl_bytes, outside
from trainer.planner.knobs import Settings
from trainer.planner.outline import notes_of
from trainer.planner.predict import Prediction, predict, predict_here, prepared
from trainer.planner.report import Candidate, PlanReport, explain, not_fitting
from trainer.planner.target import Target, budget_bytes, gpu_here
from trainer.recipe import Recipe
from trainer.system.children import in_children
from trainer.system.text import gigabytes

MARGIN = 0.03  # part of the budget that a prediction must leave free: the error that is aimed at
WHOLE = "90%"  # the budget of a recipe that names none, but leaves knobs to the planner

Progress = Callable[[int, int, str], None]
"""Called with the predictions that are done, how many there will be, and the plan that was just predicted."""


def plan(
    recipe: Recipe,
    *,
    gpu: str | GPU | None = None,
    devices: int | None = None,
    nodes: int = 1,
    budget: str | None = None,
    lossy: bool = False,
    progress: Progress | None = None,
    quick: bool = False,
) -> PlanReport:
    """Find the fastest plan of ``recipe`` that fits a budget; no GPU is needed.

    Args:
        recipe: what is to be trained. Knobs that it sets stay as they are.
        gpu: such as a100-80gb, or cpu; by default the one that is there.
        devices: ranks, over all nodes; by default ``run.devices``, or 1.
        nodes: machines.
        budget: memory that torch may take on each device, such as 8GB or 90%; by default the recipe's, or 90 %.
        lossy: whether plans that change the result (half-precision weights, 8-bit optimizer state) are candidates, too.
        progress: told after each prediction.
        quick: stop as soon as nothing can be faster: when the plan without any technique fits.

    Raises:
        RecipeError: when the recipe cannot work, or the GPU is not known.
    """
    search = search_for(recipe, gpu, devices, nodes, budget)
    search.progress = progress or search.progress
    return search.run(lossy, quick)


def search_for(
    recipe: Recipe, gpu: str | GPU | None, devices: int | None, nodes: int, budget: str | None = None
) -> Search:
    """The search that :func:`plan` does, ready to run; arguments and errors as there."""
    target, ranks = target_for(gpu), devices or devices_of(recipe)
    require(ranks % nodes == 0, f"--devices={ranks} must be a multiple of --nodes={nodes}")
    return Search(prepared(recipe, outlines=True), target, ranks, nodes, budget)


def target_for(gpu: str | GPU | None) -> Target:
    """What ``--gpu`` means: a card by name, ``cpu``, or the card that is there."""
    if gpu == "cpu":
        return Target.here(host_as_device())
    card = gpu_named(gpu) if isinstance(gpu, str) else gpu or gpu_here()
    if card is None:
        raise RecipeError(f"no GPU is there: say which one is meant with --gpu: {', '.join(sorted(GPUS))}, or cpu")
    return Target.here(card)


def devices_of(recipe: Recipe) -> int:
    """The ranks that the recipe asks for; 1 where it leaves them open."""
    return 1 if recipe.run.devices == "auto" else recipe.run.devices


class Search:
    """A search for one recipe, from :func:`trainer.planner.predict.prepared`; the others are as for :func:`plan`."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        devices: int,
        nodes: int = 1,
        budget: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.target, self.devices, self.nodes = target, devices, nodes
        text = budget or recipe.memory.budget or WHOLE
        self.recipe = recipe.replace(memory=dataclasses.replace(recipe.memory, budget=text))
        self.budget = budget_bytes(text, target.gpu, devices)
        self.progress = progress or (lambda done, total, text: None)
        self.done = self.total = 0
        self.refused: list[Candidate] = []
        model = recipe.model
        self.notes = dict.fromkeys(notes_of(recipe.data))
        self.notes |= {CUT_MATTERS.format(type(model).__name__): None} if model.samples_interact else {}

    def heading(self, count: int, trained: int) -> str:
        """What is going to be planned, for a model of ``count`` parameters, of which so many are trained."""
        recipe, gpu, nodes = self.recipe, self.target.gpu, self.nodes
        frozen = f" ({trained:,} trained)" if trained < count else ""
        where = f" on {nodes} machines" if nodes > 1 else ""
        samples, free = cut_at(recipe, self.devices, 0).batch_size, f"{100 * MARGIN:g} % are to stay free"
        rows = [
            ("model", f"{type(recipe.model).__name__}: {count:,} parameters{frozen}"),
            ("batch", f"{samples:,} samples a step, {recipe.memory.precision}"),
            ("devices", f"{self.devices} × {gpu.title} of {gigabytes(gpu.memory)}{where}"),
            ("budget", f"{gigabytes(self.budget)} on each device for torch, of which {free}"),
        ]
        if gpu.context:
            nccl = f" and {gigabytes(nccl_bytes(self.devices))} for NCCL" if self.devices > 1 else ""
            rows.append(("outside", f"on top, about {gigabytes(gpu.context)} for the CUDA context{nccl}"))
        if gpu.note:
            rows.append(("note", gpu.note))
        return "\n".join(f"{label:<8} {text}" for label, text in rows)

    def run(self, lossy: bool = False, quick: bool = False) -> PlanReport:
        """Predict, choose, predict the choice, and say why."""
        began = time.perf_counter()
        settings = knobs.combinations(self.recipe, self.devices, on_gpu=self.target.device.type == "cuda")
        if lossy:
            steps = knobs.lossy_steps(self.recipe)
            settings += [found for step in steps for one in settings if (found := self._at_a_loss(one, step))]
        sizes = knobs.micro_batch_sizes(self.recipe, self.devices)
        # Without any technique, if that fits, nothing is faster.
        candidates = self._predicted([with_size(settings[0], sizes[0])]) if quick else []
        if not any(one.fits for one in candidates):
            candidates = self._all(settings, sizes)
        candidates = self._choose(candidates, timeline=not quick)
        chosen = bool(candidates) and candidates[0].fits
        if chosen:
            explanations = explain(candidates)
        else:
            lossy_ones = [] if lossy else self._smaller_at_a_loss(candidates)
            explanations = not_fitting(candidates, self.budget, lossy_ones, self.refused)
        shown = [
            dataclasses.replace(one, flags=knobs.changed(self.recipe, one.flags))
            for one in [*candidates, *self.refused]
        ]
        return PlanReport(
            recipe=self.recipe,
            device=self.target.gpu.title,
            devices=self.devices,
            nodes=self.nodes,
            budget=self.budget,
            margin=MARGIN,
            outside=outside(self.target.gpu, self.devices),
            chosen=shown[0] if chosen else None,
            candidates=shown,
            explanations=explanations,
            notes=list(self.notes),
            seconds=time.perf_counter() - began,
        )

    def _all(self, settings: list[Settings], sizes: Sequence[int | None]) -> list[Candidate]:
        """All combinations: with the smallest micro-batch, and with all others where that one fits."""
        expected = min(2, len(sizes)) * len(settings)
        smallest = self._predicted([with_size(one, sizes[-1]) for one in settings], expected)
        if len(sizes) == 1:
            return smallest
        feasible = [one for one in smallest if one.fits]
        self.total = self.done + len(feasible)
        found = list(smallest)
        largest = self._largest(feasible, sizes[0])
        for small in feasible:
            for large in largest:
                if knobs.without_size(large.flags) == knobs.without_size(small.flags):
                    found += [large, *(self._between(small, large, size) for size in sizes[1:-1] if size)]
        return found

    def _largest(self, feasible: list[Candidate], size: int | None) -> list[Candidate]:
        """The combinations with the largest micro-batch, but for those that can only be slower than one that fits."""
        found: list[Candidate] = []
        for level in sorted({knobs.intrusion(one.flags) for one in feasible}):
            same = [with_size(one.flags, size) for one in feasible if knobs.intrusion(one.flags) == level]
            enough = [one.flags for one in found if one.fits]
            left = [one for one in same if not any(knobs.does_more(one, other) for other in enough)]
            self.total -= len(same) - len(left)
            found += self._predicted(left)
        return found

    def _predicted(self, settings: list[Settings], expected: int = 0) -> list[Candidate]:
        """Candidates with these settings; those that are refused are kept apart."""
        jobs = [job for one in settings if (job := self._job(one)) is not None]
        self.total = max(self.total, expected - (len(settings) - len(jobs)), self.done + len(jobs))
        found = []
        calls = [partial(predict_here, recipe, plan, self.target, self.nodes, False) for _, recipe, plan in jobs]
        for number, result in in_children(calls):
            settings_of, _, plan = jobs[number]
            self.done += 1
            self.progress(self.done, self.total, plan.describe())
            if isinstance(result, Exception):
                self._refuse(settings_of, result, plan.describe())
            else:
                found.append(self._candidate(settings_of, plan, Prediction.answered(result)))
        return found

    def _job(self, settings: Settings) -> tuple[Settings, Recipe, Plan] | None:
        try:
            recipe = knobs.applied(self.recipe, settings)
            return settings, recipe, decide_plan(recipe, self.devices)
        except RecipeError as error:
            self._refuse(settings, error)
            return None

    def _refuse(self, settings: Settings, error: Exception, description: str = "") -> None:
        self.refused.append(Candidate(settings, description, reason=str(error).splitlines()[0]))

    def _candidate(self, settings: Settings, plan: Plan, found: Prediction) -> Candidate:
        self.notes |= dict.fromkeys(found.notes)
        if found.guesses:
            self.notes[f"{found.guesses} branches of the model depend on values that were guessed"] = None
        figures = (found.allocated, found.reserved, found.host, found.cost.step_ms)
        return Candidate(settings, plan.describe(), *figures, self._fits(found.reserved), prediction=found)

    def _fits(self, reserved: int) -> bool:
        return reserved * (1 + MARGIN) <= self.budget

    def _between(self, small: Candidate, large: Candidate, size: int) -> Candidate:
        """The candidate with a micro-batch of ``size``, from those with a smaller and a larger one."""
        settings = with_size(small.flags, size)
        plan = self._plan(settings)
        cut, cuts = plan.first_cut, [self._plan(one.flags).first_cut for one in (small, large)]
        ends = [one.prediction for one in (small, large) if one.prediction is not None]
        first, last = (one.micro_batch_size for one in cuts)
        part = (cut.micro_batch_size - first) / max(1, last - first)

        def mixed(name: str) -> int:
            first, last = (getattr(one, name) for one in ends)
            return round(first + part * (last - first))

        # Time of a micro-step, and of what comes once a step; the latter is the same for both.
        once = min(one.cost.update_ms for one in ends)
        each = [(one.cost.step_ms - once) / end.accumulate for one, end in zip(ends, cuts, strict=True)]
        step_ms = once + cut.accumulate * (each[0] + part * (each[1] - each[0]))
        allocated, reserved, host = (mixed(name) for name in ("allocated", "reserved", "host"))
        fits = self._fits(reserved)
        return Candidate(settings, plan.describe(), allocated, reserved, host, step_ms, fits, traced=False)

    def _plan(self, settings: Mapping[str, Any]) -> Plan:
        return decide_plan(knobs.applied(self.recipe, settings), self.devices)

    def _choose(self, candidates: list[Candidate], timeline: bool) -> list[Candidate]:
        """All, with their reasons: the fastest that fits, or else the smallest, is first and traced itself."""
        ordered = sorted(candidates, key=_rank)
        while ordered and ordered[0].fits and not ordered[0].traced:
            ordered[:1] = self._predicted([dict(ordered[0].flags)])
            ordered.sort(key=_rank)
        if ordered and timeline:
            flags = dict(ordered[0].flags)
            plan = self._plan(flags)
            found = predict(knobs.applied(self.recipe, flags), plan, self.target, self.nodes, timeline=True)
            ordered[0] = self._candidate(flags, plan, found)
        return [dataclasses.replace(one, reason=self._reason(one, ordered[0])) for one in ordered]

    def _reason(self, one: Candidate, first: Candidate) -> str:
        assert one.reserved is not None
        over = one.reserved - self.budget
        if not one.fits:
            near = f"within the budget, but not with the margin of {100 * MARGIN:g} %"
            return f"{gigabytes(over)} more than the budget" if over > 0 else near
        if one is first:
            return f"the fastest of those that fit; {gigabytes(-over)} of the budget stay free"
        if not first.step_ms or one.step_ms is None:
            return ""
        return f"fits, {100 * (one.step_ms / first.step_ms - 1):.0f} % slower"

    def _smaller_at_a_loss(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """What would save more, at a loss that the recipe has not allowed: each with the smallest plan it goes with."""
        wanted = []
        for step in knobs.lossy_steps(self.recipe):
            possible = (self._at_a_loss(dict(one.flags), step) for one in candidates)
            wanted += [settings for settings in possible if settings][:1]
        return self._predicted(wanted)

    def _at_a_loss(self, settings: Settings, step: Settings) -> Settings | None:
        """The settings with ``step``, without what only comes along where that is refused; ``None`` if all is."""
        for extra in (step, {key: value for key, value in step.items() if key not in FOLLOWERS}):
            with suppress(RecipeError):
                self._plan(settings | extra)
                return settings | extra
        return None


def _rank(candidate: Candidate) -> tuple[bool, float, int]:
    """Those that fit by their time, then the others by their size; of equal ones that with the fewest knobs."""
    figure = candidate.step_ms if candidate.fits else candidate.reserved
    return not candidate.fits, figure or 0.0, len(knobs.turned(candidate.flags))


def with_size(settings: Mapping[str, Any], size: int | None) -> Settings:
    """The settings with a micro-batch of ``size``; ``None`` leaves it to the recipe."""
    return dict(settings) | ({} if size is None else {"memory.micro_batch_size": size})
