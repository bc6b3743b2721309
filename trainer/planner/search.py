"""The fastest plan that fits: every sensible combination of knobs is predicted, and the best is predicted again.

The memory and the time of a micro-step are nearly affine in the size of the micro-batch, so a combination is traced
with the smallest and the largest, and those in between lie between them. What was chosen so is then traced itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trainer.errors import RecipeError, require
from trainer.memory.plan import Plan, decide_plan
from trainer.memory.units import GB
from trainer.planner.children import in_child, in_children
from trainer.planner.gpus import GPU, detected_gpu, gpu_named, usable_memory
from trainer.planner.knobs import (
    Settings,
    applied,
    combinations,
    does_more,
    intrusion,
    lossy_steps,
    micro_batch_sizes,
)
from trainer.planner.predict import Prediction, predict, predict_here, prepared
from trainer.planner.report import Candidate, PlanReport
from trainer.planner.target import Target
from trainer.recipe import Recipe, parse_budget

MARGIN = 0.03
"""Part of the budget that a prediction must leave free: the error that is aimed at."""

WHOLE = "90%"
"""The budget of a recipe that names none, but leaves knobs to the planner."""

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
        gpu: such as a100-80gb; by default the one that is there.
        devices: ranks, over all nodes; by default ``run.devices``, or 1.
        nodes: machines.
        budget: memory that torch may take on each device, such as 8GB or 90%; by default the recipe's, or 90 %.
        lossy: whether plans that change the result (half-precision weights, 8-bit optimizer state) are candidates, too.
        progress: told after each prediction.
        quick: stop as soon as nothing can be faster: when the plan without any technique fits.

    Raises:
        RecipeError: when the recipe cannot work, or the GPU is not known.
    """
    search = Search(prepared(recipe), _target(gpu), _devices(recipe, devices), nodes, budget, progress)
    return search.run(lossy, quick)


def _target(gpu: str | GPU | None) -> Target:
    card = gpu_named(gpu) if isinstance(gpu, str) else gpu or gpu_of_this_machine()
    require(card is not None, "no GPU is there: say which one is meant with --gpu, such as --gpu a100-80gb")
    assert card is not None
    return Target.here(card)


def gpu_of_this_machine() -> GPU | None:
    """The GPU that torch sees, if any; asked for in a process of its own, so that this one can still fork others."""
    if torch.cuda.is_initialized():
        return detected_gpu()
    found = in_child(lambda: dataclasses.asdict(gpu) if (gpu := detected_gpu()) else None, sees_gpu=True)
    return found and GPU(**found | {"capability": tuple(found["capability"])})


def _devices(recipe: Recipe, devices: int | None) -> int:
    if devices is not None:
        return devices
    return 1 if recipe.run.devices == "auto" else recipe.run.devices


@dataclass(frozen=True)
class Job:
    """One plan to predict."""

    settings: Settings
    recipe: Recipe
    plan: Plan


class Search:
    """A search for one recipe and one machine.

    Args:
        recipe: from :func:`trainer.planner.predict.prepared`.
        target: the GPU.
        devices: ranks, over all nodes.
        nodes: machines.
        budget: as for :func:`plan`.
        progress: told after each prediction.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        devices: int,
        nodes: int = 1,
        budget: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        require(devices % nodes == 0, f"--devices={devices} must be a multiple of --nodes={nodes}")
        self.target, self.devices, self.nodes = target, devices, nodes
        text = budget or recipe.memory.budget or WHOLE
        self.recipe = recipe.replace(memory=dataclasses.replace(recipe.memory, budget=text))
        self.budget = budget_bytes(text, target.gpu, devices)
        self.progress = progress or (lambda done, total, text: None)
        self.done = self.total = 0
        self.refused: list[Candidate] = []
        self.notes: dict[str, None] = {}

    def run(self, lossy: bool = False, quick: bool = False) -> PlanReport:
        """Predict, choose, predict the choice, and say why."""
        began = time.perf_counter()
        settings = combinations(self.recipe, self.devices, on_gpu=self.target.device.type == "cuda")
        if lossy:
            settings += [one | extra for extra in lossy_steps(self.recipe) for one in settings]
        sizes = micro_batch_sizes(self.recipe, self.devices)
        candidates = self._quick(settings[0], sizes) if quick else []
        if not candidates:
            candidates = self._all(settings, sizes)
        chosen, candidates = self._choose(candidates)
        explanations = self._explain(chosen, candidates) if chosen else self._what_is_missing(candidates, lossy)
        return PlanReport(
            device=self.target.gpu.title,
            devices=self.devices,
            nodes=self.nodes,
            budget=self.budget,
            margin=MARGIN,
            outside=self.target.gpu.memory - usable_memory(self.target.gpu, self.devices),
            chosen=chosen,
            candidates=candidates + self.refused,
            explanations=explanations,
            notes=list(self.notes),
            seconds=time.perf_counter() - began,
        )

    # ---------------------------------------------------------------------------------------------------- predicting

    def fits(self, reserved: int) -> bool:
        """Whether so many bytes stay within the budget, with the margin."""
        return reserved * (1 + MARGIN) <= self.budget

    def _quick(self, settings: Settings, sizes: Sequence[int | None]) -> list[Candidate]:
        """The plan without any technique, if it fits: nothing is faster. Else nothing."""
        found = self._predicted([with_size(settings, sizes[0])])
        return [one for one in found if one.fits]

    def _all(self, settings: list[Settings], sizes: Sequence[int | None]) -> list[Candidate]:
        """All combinations: with the smallest micro-batch, and with all others where that one fits."""
        smallest = self._predicted([with_size(one, sizes[-1]) for one in settings], expected=2 * len(settings))
        if len(sizes) == 1:
            return smallest
        feasible = [one for one in smallest if one.fits]
        self.total = self.done + len(feasible)
        found = list(smallest)
        largest = self._largest(feasible, sizes[0])
        for small in feasible:
            for large in largest:
                if without_size(large.flags) == without_size(small.flags):
                    found += [large, *(self._between(small, large, size) for size in sizes[1:-1] if size)]
        return found

    def _largest(self, feasible: list[Candidate], size: int | None) -> list[Candidate]:
        """The combinations with the largest micro-batch, but for those that can only be slower than one that fits."""
        found: list[Candidate] = []
        levels = sorted({intrusion(one.flags) for one in feasible})
        for level in levels:
            same = [with_size(one.flags, size) for one in feasible if intrusion(one.flags) == level]
            enough = [one.flags for one in found if one.fits]
            left = [one for one in same if not any(does_more(one, other) for other in enough)]
            self.total -= len(same) - len(left)
            found += self._predicted(left)
        return found

    def _predicted(self, settings: list[Settings], expected: int = 0) -> list[Candidate]:
        """Candidates with these settings; those that are refused are kept apart."""
        jobs = [job for one in settings if (job := self._job(one)) is not None]
        self.total = max(self.total, expected - (len(settings) - len(jobs)), self.done + len(jobs))
        found = []
        calls = [partial(predict_here, j.recipe, j.plan, self.target, self.nodes, False) for j in jobs]
        for number, result in in_children(calls):
            self.done += 1
            self.progress(self.done, self.total, jobs[number].plan.describe())
            if isinstance(result, Exception):
                self._refuse(jobs[number].settings, result, jobs[number].plan.describe())
            else:
                found.append(self._candidate(jobs[number], Prediction(**result)))
        return found

    def _job(self, settings: Settings) -> Job | None:
        try:
            recipe = applied(self.recipe, settings)
            return Job(settings, recipe, decide_plan(recipe, self.devices))
        except RecipeError as error:
            self._refuse(settings, error)
            return None

    def _refuse(self, settings: Settings, error: Exception, description: str = "") -> None:
        reason = str(error).splitlines()[0]
        self.refused.append(Candidate(settings, description, None, None, None, None, False, reason))

    def _candidate(self, job: Job, found: Prediction) -> Candidate:
        self.notes |= dict.fromkeys(found.notes)
        if found.guesses:
            self.notes[f"{found.guesses} branches of the model depend on values that were guessed"] = None
        return Candidate(
            job.settings,
            job.plan.describe(),
            found.allocated,
            found.reserved,
            found.host,
            found.step_ms,
            self.fits(found.reserved),
            prediction=found,
        )

    def _between(self, small: Candidate, large: Candidate, size: int) -> Candidate:
        """The candidate with a micro-batch of ``size``, from those with a smaller and a larger one."""
        settings = with_size(small.flags, size)
        job = self._job(settings)
        assert job is not None
        ends = [one.prediction for one in (small, large) if one.prediction is not None]
        sizes = [self._size(small), self._size(large)]
        part = (job.plan.first_cut.micro_batch_size - sizes[0]) / max(1, sizes[1] - sizes[0])

        def mixed(name: str) -> int:
            first, last = (getattr(one, name) for one in ends)
            return round(first + part * (last - first))

        reserved = mixed("reserved")
        micro_steps = [self._micro_steps(small), self._micro_steps(large)]
        # Time of a micro-step, and of what comes once a step; the latter is the same for both.
        once = min(one.times.get("step_phase_ms", 0.0) for one in ends)
        each = [(one.step_ms - once) / count for one, count in zip(ends, micro_steps, strict=True)]
        step_ms = once + job.plan.first_cut.accumulate * (each[0] + part * (each[1] - each[0]))
        return Candidate(
            settings,
            job.plan.describe(),
            mixed("allocated"),
            reserved,
            mixed("host"),
            step_ms,
            self.fits(reserved),
            traced=False,
        )

    def _cut(self, candidate: Candidate) -> Any:
        return decide_plan(applied(self.recipe, candidate.flags), self.devices).first_cut

    def _size(self, candidate: Candidate) -> int:
        return self._cut(candidate).micro_batch_size

    def _micro_steps(self, candidate: Candidate) -> int:
        return self._cut(candidate).accumulate

    # ------------------------------------------------------------------------------------------------------ choosing

    def _choose(self, candidates: list[Candidate]) -> tuple[Candidate | None, list[Candidate]]:
        """The fastest that fits, traced itself; and all candidates in order, each with its reason."""
        ordered = sorted(candidates, key=lambda one: (not one.fits, one.step_ms if one.fits else one.reserved))
        chosen = None
        while chosen is None and ordered and ordered[0].fits:
            first = ordered.pop(0)
            if not first.traced:
                first = self._predicted([dict(first.flags)])[0]
            if first.fits:
                chosen = first
            ordered.append(first)
            ordered.sort(key=lambda one: (not one.fits, one.step_ms if one.fits else one.reserved))
        if chosen is not None:
            chosen = self._with_timeline(chosen)
            ordered = [chosen] + [one for one in ordered if one.flags != chosen.flags]
        return chosen, [one if one is chosen else self._reasoned(one, chosen) for one in ordered]

    def _with_timeline(self, chosen: Candidate) -> Candidate:
        job = self._job(dict(chosen.flags))
        assert job is not None
        found = predict(job.recipe, job.plan, self.target, self.nodes, timeline=True)
        spare = (self.budget - found.reserved) / GB
        reason = f"the fastest of those that fit; {spare:.2f} GB of the budget stay free"
        return dataclasses.replace(self._candidate(job, found), reason=reason)

    def _reasoned(self, one: Candidate, chosen: Candidate | None) -> Candidate:
        assert one.reserved is not None
        if not one.fits:
            over = one.reserved - self.budget
            if over > 0:
                return one.because(f"{over / GB:.2f} GB more than the budget")
            return one.because(f"within the budget, but not with the margin of {100 * MARGIN:g} %")
        if chosen is None or not chosen.step_ms or one.step_ms is None:
            return one
        return one.because(f"fits, {100 * (one.step_ms / chosen.step_ms - 1):.0f} % slower")

    # ---------------------------------------------------------------------------------------------------- explaining

    def _explain(self, chosen: Candidate, candidates: Iterable[Candidate]) -> list[str]:
        """What each knob of the chosen plan bought and cost, against the same plan without it."""
        lines = []
        for key, value in chosen.flags.items():
            others = [
                one
                for one in candidates
                if one is not chosen and {**one.flags, key: None} == {**chosen.flags, key: None}
            ]
            lines += [f"{key} {value} instead of {one.flags[key]}: {_difference(chosen, one)}" for one in others]
        return lines

    def _what_is_missing(self, candidates: list[Candidate], lossy: bool) -> list[str]:
        """By how much the smallest plan misses the budget, and what that loses something would make it fit."""
        known = [one for one in candidates if one.reserved is not None]
        if not known:
            return ["no combination of knobs works for this recipe; the reasons are with the candidates"]
        smallest = min(known, key=lambda one: one.reserved or 0)
        assert smallest.reserved is not None
        needed = smallest.reserved * (1 + MARGIN)
        lines = [
            f"nothing fits in {self.budget / GB:.2f} GB: the smallest plan needs {smallest.reserved / GB:.2f} GB "
            f"({smallest.plan}), {(needed - self.budget) / GB:.2f} GB too much with the margin"
        ]
        if not lossy:
            extra = [dict(smallest.flags) | step for step in lossy_steps(self.recipe)]
            for one in self._predicted(extra):
                verdict = "would fit" if one.fits else "would not fit either"
                lost = {key: value for key, value in one.flags.items() if smallest.flags.get(key) != value}
                shown = ", ".join(f"{key} {value}" for key, value in lost.items())
                lines.append(f"lossy: {shown}: {one.reserved / GB:.2f} GB, {verdict}")  # type: ignore[operator]
        return lines


def budget_bytes(text: str, gpu: GPU, ranks: int) -> int:
    """Bytes that torch's allocator may take: the budget, but no more than the GPU has left for it."""
    size, is_fraction = parse_budget(text)
    return int(min(size * gpu.memory if is_fraction else size, usable_memory(gpu, ranks)))


def with_size(settings: Any, size: int | None) -> Settings:
    """The settings with a micro-batch of ``size``; ``None`` leaves it to the recipe."""
    return dict(settings) | ({} if size is None else {"memory.micro_batch_size": size})


def without_size(settings: Any) -> Settings:
    """The settings without the micro-batch."""
    return {key: value for key, value in settings.items() if key != "memory.micro_batch_size"}


def _difference(one: Candidate, other: Candidate) -> str:
    if one.reserved is None or other.reserved is None or one.step_ms is None or other.step_ms is None:
        return "not known"
    saved, slower = (other.reserved - one.reserved) / GB, 100 * (one.step_ms / other.step_ms - 1)
    memory = f"{abs(saved):.2f} GB {'less' if saved >= 0 else 'more'}"
    return f"{memory}, {abs(slower):.0f} % {'slower' if slower >= 0 else 'faster'}"
