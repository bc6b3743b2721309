"""Search for the fastest plan that fits: best first, where each trace rules out other plans.

A :class:`PlanFamily` is a set of plans that differ only in how a batch is cut. The chosen plan is always a traced one.
docs/planner/internals.md explains which plans a trace rules out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from math import inf
from typing import Any, NamedTuple

from trainer.contract import Packable, as_samples, capability
from trainer.engine.cut import cut_at, cut_batch, data_parallel_rank, tokens_of
from trainer.engine.order import batch_indices
from trainer.errors import RecipeError, require
from trainer.fakegpu.cost import ESTIMATES
from trainer.fakegpu.events import Category
from trainer.fakegpu.gpus import GPU, NO_GPU, gpu_named, host_as_device, nccl_bytes, non_allocator_bytes
from trainer.fakegpu.network import DEFAULT_NETWORK
from trainer.fakegpu.peaks import Retries
from trainer.fakegpu.prediction import PER_SAMPLE_CATEGORIES, Prediction
from trainer.fakegpu.target import Target, budget_bytes, gpu_here, reduced_budget_note
from trainer.memory.knobs import IMPLIED_NAMES, ONE_MICRO_BATCH, UNTESTED_WITH_TP
from trainer.memory.plan import CUT_MATTERS, Plan, decide_plan, with_precision
from trainer.models.causal import CausalLM
from trainer.planner import knobs
from trainer.planner.knobs import Settings, devices_of
from trainer.planner.lower_bound import ModelSize, WeightBytes, lower_bound, measure
from trainer.planner.predict import faster, predict_in_process, prepare_recipe
from trainer.planner.report import Candidate, PlanReport, explain_choice, explain_no_fit, explain_too_small, values_text
from trainer.planner.synthetic_data import data_notes
from trainer.recipe import Recipe
from trainer.system.child_jobs import ChildError, run_in_child, run_in_children
from trainer.system.text import as_text, format_bytes, wrapped
from trainer.weights.nf4 import WeightCounts

BUDGET_MARGIN = 0.03
"""Share of the budget that a prediction must leave free. Predictions are within 0.4 % of published peaks that they were
not tuned on (torch 2.4 to 2.6, median 0.07 %). Peaks of older versions were up to 2.8 % higher than predicted, and a
trace does not see allocations by kernels of cuDNN or of an extension. A run out of memory costs more than 3 % of it."""

STRATEGY = "memory.strategy"
DEFAULT_BUDGET = "90%"  # default budget of a recipe that leaves knobs to the planner
# A plan needs at least this share of the memory of a plan whose knobs all save as much or more: buffers may cost a bit.
MIN_MEMORY_RATIO = 0.9
# Share of an update's peak that is independent of the micro-batch. Traces of a ViT: all of 3 MB except 1 kB.
UPDATE_PEAK_SHARE = 0.99

Progress = Callable[[int, int, str], None]
"""Called after each prediction with the number done, the number known so far, and a description of the plan."""


def plan(
    recipe: Recipe,
    *,
    gpu: str | GPU | None = None,
    devices: int | None = None,
    nodes: int = 1,
    budget: str | None = None,
    lossy: bool = False,
    progress: Progress | None = None,
    everything: bool = False,
    interconnect: str | None = None,
) -> PlanReport:
    """Find the fastest plan of ``recipe`` that fits a budget; no GPU is needed.

    Args:
        recipe: the recipe to plan. Knobs that it sets are kept.
        gpu: such as a100-80gb, or cpu; by default the GPU of this machine.
        devices: ranks over all nodes; by default ``run.devices``, or 1.
        nodes: machines.
        budget: maximum memory for torch on each device, such as 8GB or 90%; by default the recipe's, or 90 %.
        lossy: also consider plans that change the result (half-precision weights, 8-bit optimizer state).
        progress: called after each prediction.
        everything: also predict plans that cannot be chosen, because they are slower than one that fits, or too large.
        interconnect: the network of the devices, such as 100gbe; by default 200 Gbit/s InfiniBand between nodes.

    Raises:
        RecipeError: if the recipe cannot work, or the GPU is unknown.
    """
    search = search_for(recipe, gpu, devices, nodes, budget, interconnect)
    search.progress = progress or search.progress
    return search.run(lossy, everything)


def search_for(
    recipe: Recipe,
    gpu: str | GPU | None,
    devices: int | None,
    nodes: int,
    budget: str | None = None,
    interconnect: str | None = None,
) -> Search:
    """Return the search of :func:`plan`, not started; same arguments and errors."""
    target, ranks = target_for(gpu, interconnect), devices or devices_of(recipe)
    require(ranks % nodes == 0, f"--devices={ranks} must be a multiple of --nodes={nodes}")
    return Search(prepare_recipe(recipe, outlines=True), target, ranks, nodes, budget)


def target_for(gpu: str | GPU | None, interconnect: str | None = None) -> Target:
    """Return the target for ``--gpu``: a card by name, ``cpu``, or this machine's card; and its interconnect."""
    if isinstance(gpu, str):
        gpu = host_as_device() if gpu == "cpu" else gpu_named(gpu)
    card = gpu or gpu_here()
    if card is None:
        raise RecipeError(NO_GPU)
    return Target.here(card, interconnect or DEFAULT_NETWORK)


@dataclass(eq=False)
class PlanFamily:
    """Plans that differ only in the micro-batch: a rank's share in one micro-step, or cut into several."""

    settings: Settings  # without the micro-batch
    micro_batch_sizes: list[int]  # largest first; ``[0]`` if the recipe sets it
    sharded: bool  # whether weights are sharded, and sometimes gathered
    single_micro_step: bool  # whether a rank's share is one micro-step
    floor: int = 0  # lower bound in bytes, from the weights alone
    traced: dict[int, Candidate] = field(default_factory=dict)  # traced plans, by micro-batch size
    partly_untraceable: bool = False  # whether tracing one of the plans failed
    failed: bool = False  # whether the arm is given up
    dominated_by: list[PlanFamily] = field(default_factory=list)  # arms that compute and move no more than this one
    stronger: list[PlanFamily] = field(default_factory=list)  # arms in which every knob saves at least as much memory
    same_state: list[PlanFamily] = field(default_factory=list)  # arms with the same weights and optimizer state
    same_settings: list[PlanFamily] = field(default_factory=list)  # arms whose traces are used to estimate this arm
    bracketing: list[list[PlanFamily]] = field(default_factory=list)  # for a fraction: arms with none and with full


class Estimate(NamedTuple):
    """Estimated values of a plan, from traced plans."""

    allocated: float  # lower bound in bytes
    reserved: float  # expected bytes
    step_ms: float  # milliseconds per step
    growing: float = 0.0  # the part of ``allocated`` that may grow with the micro-batch


class Search:
    """A search for a recipe from :func:`~trainer.planner.predict.prepare_recipe`; arguments as for :func:`plan`."""

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
        wanted = budget or recipe.memory.budget
        text = wanted or DEFAULT_BUDGET
        recipe = with_precision(recipe, target.gpu.capability)
        self.recipe = recipe.replace(memory=dataclasses.replace(recipe.memory, budget=text))
        self.budget = budget_bytes(text, target.gpu, devices)
        self.limit = int(self.budget / (1 + BUDGET_MARGIN))  # maximum bytes that a plan may reserve
        self.cut_budget = reduced_budget_note(wanted, target.gpu, devices)
        self.progress = progress or (lambda done, total, text: None)
        self.done = 0
        self.refused: list[Candidate] = []
        self.impossible: list[str] = []  # why no plan can be traced, or needs to be
        self.arms: list[PlanFamily] = []
        self.padding: dict[int, float] = {}
        self.has_bound = True  # whether the weights can be counted without a trace
        self.keeps_columns = False  # whether predictions have what the page "Will it fit?" replays
        self.notes = dict.fromkeys(data_notes(recipe.data))
        if recipe.memory.tensor_parallel > 1:
            untested = ", ".join(UNTESTED_WITH_TP)
            self.notes[f"not tried, because not verified with memory.tensor_parallel: {untested}"] = None
        if recipe.model.samples_interact:
            self.notes[CUT_MATTERS.format(type(recipe.model).__name__)] = None

    @cached_property
    def size(self) -> ModelSize:
        """The weights of the model, counted in a child process."""
        counts, *sizes = run_in_child(partial(measure, self.recipe))
        return ModelSize(WeightCounts(*counts), *(WeightBytes(*one) for one in sizes))

    def _bound(self, plan: Plan) -> dict[str, int]:
        if self.has_bound:
            try:
                return lower_bound(self.size, plan, self.recipe)
            except (ChildError, RecipeError):  # it cannot be built on meta: do not try again for every plan
                self.has_bound = False
        return {}

    def heading(self) -> str:
        """Format what is planned."""
        recipe, gpu, nodes = self.recipe, self.target.gpu, self.nodes
        where = f" on {nodes} machines" if nodes > 1 else ""
        samples, margin = cut_at(recipe, self.devices, 0).batch_size, f"{100 * BUDGET_MARGIN:g} %"
        rows = [
            ("model", f"{type(recipe.model).__name__}: {self.size.counts}"),
            ("batch", f"{samples:,} samples per step, {recipe.memory.precision}"),
            ("devices", f"{self.devices} × {gpu.title} of {format_bytes(gpu.memory)}{where}"),
            ("budget", f"{format_bytes(self.budget)} on each device for torch; {margin} is kept free as a margin"),
        ]
        if self.devices > 1:
            network = self.target.network
            across = f"{network.name}: {network.describe_inter_node}; " if nodes > 1 else ""
            rows.append(("network", f"{across}within a node {network.describe_intra_node}"))
        rows.append(("times", ESTIMATES))
        if gpu.cuda_context_bytes:
            context = f"in addition, about {format_bytes(gpu.cuda_context_bytes)} for the CUDA context"
            nccl = f" and {format_bytes(nccl_bytes(self.devices))} for NCCL" if self.devices > 1 else ""
            rows.append(("outside", context + nccl))
        rows += [("note", gpu.note)] if gpu.note else []
        return "\n".join(wrapped(f"{label:<8} {text}", " " * 9) for label, text in rows)

    def run(self, lossy: bool = False, everything: bool = False) -> PlanReport:
        """Predict plans, choose one, and explain the choice."""
        began = time.perf_counter()
        on_gpu = self.target.device.type == "cuda"
        settings = knobs.combinations(self.recipe, self.devices, on_gpu, self.nodes)
        model, lengths = self.recipe.model, as_samples(self.recipe.data.train).lengths
        if isinstance(model, CausalLM) and lengths is not None and model.has_tiles(max(lengths)):
            # Selective checkpointing keeps the products of all tiles: more memory than none, and more time.
            settings = [one for one in settings if one.get(knobs.CHECKPOINTING) != "selective"]
        if lossy:
            steps = knobs.lossy_steps(self.recipe, on_gpu)
            settings += [found for step in steps for one in settings if (found := self._with_lossy_step(one, step))]
        sizes = [size or 0 for size in knobs.micro_batch_sizes(self.recipe, self.devices)]
        self.padding = self._padding(sizes)
        self.arms = [arm for one in settings for arm in self._arms(one, sizes)]
        self._link_families()
        if everything:
            self._trace(lambda: self._next()[: not self.done] or self._ends())
        else:
            self._reject_by_weights()
        self._trace(self._next)
        candidates = self._ordered(everything)
        chosen = bool(candidates) and candidates[0].rank_ms < inf
        possible = {repr(arm.settings) for arm in self.arms if arm.traced or not arm.failed}
        refused = {repr(arm.settings) for arm in self.arms if arm.failed}
        refused |= {repr(knobs.without_size(one.flags)) for one in self.refused}
        counts = len(possible), len(refused - possible)
        if chosen:
            explanations = explain_choice(candidates, counts)
            self.notes |= dict.fromkeys(faster(self.recipe, self.devices, self.target.gpu, candidates[0].prediction))
        elif self.impossible:
            explanations = self.impossible
        else:
            lossy_ones = [] if lossy else self._smaller_at_a_loss(candidates)
            explanations = explain_no_fit(candidates, counts, self.budget, lossy_ones, self.refused)
        every = (*candidates, *self.refused)
        shown = [dataclasses.replace(one, flags=knobs.changed_settings(self.recipe, one.flags)) for one in every]
        return PlanReport(
            recipe=self.recipe,
            device=self.target.gpu.title,
            devices=self.devices,
            nodes=self.nodes,
            interconnect=self.target.joined_by if self.nodes > 1 or self.target.joined_by != DEFAULT_NETWORK else None,
            budget=self.budget,
            margin=BUDGET_MARGIN,
            outside=non_allocator_bytes(self.target.gpu, self.devices),
            chosen=shown[0] if chosen else None,
            candidates=shown,
            explanations=[*self.cut_budget, *explanations],
            notes=list(self.notes),
            seconds=time.perf_counter() - began,
        )

    def _arms(self, settings: Settings, sizes: Sequence[int]) -> Iterator[PlanFamily]:
        undivided = {key: settings[key] for key in ONE_MICRO_BATCH if settings.get(key)}
        whole = with_size(settings, sizes[0])
        try:
            plan = self._plan(whole)
        except RecipeError as error:
            # A combination that the search added does not apply here: that is no rejection.
            if not knobs.changed_settings(self.recipe, undivided):
                self._refuse(whole, error)
            return
        sharded = plan.strategy == "fsdp"
        floor = sum(self._bound(plan).values())
        if plan.initial_cut.accumulate > 1 or not settings.get(knobs.SYNC):
            yield PlanFamily(settings, list(sizes[:1]), sharded, True, floor)
        if sizes[1:] and not undivided:
            yield PlanFamily(settings, list(sizes[1:]), sharded, False, floor)

    def _reject_by_weights(self) -> None:
        """Give up all plans if the weights alone need more memory than there is."""
        least = min(self.arms, key=lambda arm: arm.floor, default=None)
        if least is not None and least.floor > self.limit:
            plan = self._plan(with_size(least.settings, least.micro_batch_sizes[-1]))
            self._give_up(explain_too_small(plan, self._bound(plan), self.budget))

    def _give_up(self, reasons: list[str]) -> None:
        self.impossible = reasons
        for arm in self.arms:
            arm.failed = True

    def _link_families(self) -> None:
        by_settings: dict[str, list[PlanFamily]] = {}
        by_kept: dict[str, list[PlanFamily]] = {}
        for arm in self.arms:
            by_settings.setdefault(repr(arm.settings), []).append(arm)
            by_kept.setdefault(repr(knobs.state_settings(arm.settings)), []).append(arm)
        for arm in self.arms:
            wanted, checkpointing = arm.settings, arm.settings.get(knobs.CHECKPOINTING)
            arm.dominated_by = [one for one in self.arms if knobs.is_slower_or_equal(wanted, one.settings, arm.sharded)]
            alike = (one for one in self.arms if one.single_micro_step == arm.single_micro_step and one is not arm)
            # Streaming FSDP keeps everything outside the blocks whole, up to three times: that may be most of a model.
            streamed = wanted.get(knobs.OFFLOAD) == "parameters"
            alike = (one for one in alike if streamed or one.settings.get(knobs.OFFLOAD) != "parameters")
            arm.stronger = [one for one in alike if knobs.saves_at_least(one.settings, wanted)]
            arm.same_state = by_kept[repr(knobs.state_settings(wanted))]
            arm.same_settings = [*by_settings[repr(wanted)]]
            if wanted.get(knobs.SYNC):  # makes no difference in one micro-step
                arm.same_settings += by_settings.get(repr(wanted | {knobs.SYNC: None}), [])[:1]
            if isinstance(checkpointing, float):
                ends = (repr(wanted | {knobs.CHECKPOINTING: end}) for end in ("none", "full"))
                arm.bracketing = [by_settings.get(end, []) for end in ends]

    def _padding(self, sizes: Sequence[int]) -> dict[int, float]:
        """Return the padded tokens of a batch by micro-batch size, relative to the maximum; 1 without varying lengths.

        Small micro-batches of texts of similar length pad less, and so may be faster."""
        lengths: Any = as_samples(self.recipe.data.train).lengths
        tokens: dict[int, int] = {}
        for size in sizes if lengths is not None and len({*lengths}) > 1 else ():
            cut = cut_at(knobs.apply_settings(self.recipe, with_size({}, size)), self.devices, 0)
            batch = batch_indices(self.recipe.seed, 0, 0, len(lengths), cut.batch_size)
            packs = capability(self.recipe.model, Packable).packs()
            pieces = cut_batch(batch, cut, data_parallel_rank(self.recipe.memory, 0, self.devices)[1], lengths, packs)
            tokens[size] = sum(tokens_of(one, lengths, packs) for one in pieces)
        return {size: tokens[size] / max(tokens.values()) if tokens else 1.0 for size in sizes}

    # Choice of the plans to trace next.

    @property
    def _whole(self) -> list[PlanFamily]:
        return [arm for arm in self.arms if not arm.bracketing]

    def _next(self) -> list[tuple[PlanFamily, int]]:
        fastest = min((one.rank_ms for arm in self.arms for one in arm.traced.values()), default=inf)
        if fastest == inf and self.done > 1 and (last := self._last_resorts()):
            return last
        found = self._promising(self._whole, fastest) or self._between_ends(fastest)
        return found or (self._smaller() if fastest == inf else [])

    def _last_resorts(self) -> list[tuple[PlanFamily, int]]:
        live = sorted((arm for arm in self._whole if self._left(arm, inf)), key=lambda arm: not arm.single_micro_step)
        return [(arm, arm.micro_batch_sizes[-1]) for arm in live if not any(one in live for one in arm.stronger)]

    def _ends(self) -> list[tuple[PlanFamily, int]]:
        """Return the plans with the largest and the smallest micro-batch of each combination that are not traced."""
        arms = [arm for arm in self._whole if not arm.failed]
        both = {(arm, size): None for arm in arms for size in (arm.micro_batch_sizes[0], arm.micro_batch_sizes[-1])}
        return [(arm, size) for arm, size in both if size not in arm.traced]

    def _promising(self, arms: Sequence[PlanFamily], fastest: float) -> list[tuple[PlanFamily, int]]:
        """Return the plans that may be faster than all that fit, without those that another of them may rule out."""
        live = []
        for arm in arms:
            if left := self._left(arm, fastest):
                about = ((size, self._estimate(arm, size)) for size in left)
                guess = next((size for size, found in about if found and found.reserved <= self.limit), left[-1])
                live.append((self._at_least_ms(arm, guess), knobs.num_changed_levels(arm.settings), arm, guess))

        def waits(arm: PlanFamily, guess: int) -> bool:
            others = [(one, size) for _, _, one, size in live if one is not arm]
            return any(one in arm.dominated_by and size >= guess for one, size in others)

        first = sorted((one for one in live if not waits(*one[2:])), key=lambda one: one[:2])
        return [(arm, guess) for _, _, arm, guess in first]

    def _between_ends(self, fastest: float) -> list[tuple[PlanFamily, int]]:
        """Do the same for fractions of checkpointing, after tracing the arms with none and full."""
        fractions = [arm for arm in self.arms if arm.bracketing]
        ends = [end for arm in fractions if self._left(arm, fastest) for end in arm.bracketing]
        unknown = [end[0] for end in ends if end and not any(one.traced for one in end) and not end[0].failed]
        if unknown:
            return [(unknown[0], unknown[0].micro_batch_sizes[0])]
        between = [arm for arm in fractions if all(any(one.traced for one in end) for end in arm.bracketing)]
        return self._promising(between, fastest)

    def _left(self, arm: PlanFamily, fastest: float) -> list[int]:
        if arm.failed:
            return []
        runs = max((size for size, one in arm.traced.items() if one.rank_ms < inf), default=0)
        too_large = min((size for size, one in arm.traced.items() if one.rank_ms == inf), default=inf)
        new = (size for size in arm.micro_batch_sizes if size not in arm.traced and size < too_large)
        able = [size for size in new if self._at_least_ms(arm, size) < fastest and self._needs(arm, size) <= self.limit]
        # A smaller one is slower, unless it pads less or saves retries.
        known = {size: self._estimate(arm, size) for size in able if arm.bracketing or size < runs}
        return [size for size in able if (found := known.get(size)) is None or found.step_ms < fastest]

    def _smaller(self) -> list[tuple[PlanFamily, int]]:
        """If nothing fits, return a plan that may need less memory than all traced ones."""
        least = min((one.reserved or 0 for arm in self.arms for one in arm.traced.values()), default=inf)
        live = [(arm, arm.micro_batch_sizes[-1]) for arm in self._whole if not arm.failed]
        left = [(self._needs(arm, size), arm, size) for arm, size in live if size not in arm.traced]
        left.sort(key=lambda one: (one[0], -knobs.num_changed_levels(one[1].settings)))
        return [(arm, size) for needs, arm, size in left[:1] if needs < least]

    # Bounds and estimates from traces.

    def _at_least_ms(self, arm: PlanFamily, size: int) -> float:
        slower = (
            one.prediction.cost.work_ms * min(1.0, self.padding[size] / self.padding[known])
            for other in arm.dominated_by
            for known, one in other.traced.items()
            if known >= size and one.prediction
        )
        return max(slower, default=0.0)

    def _needs(self, arm: PlanFamily, size: int) -> float:
        """Return a lower bound in bytes for a plan of ``arm``, from plans with the same weights and optimizer state."""
        fixed: tuple[Category, ...] = ("optimizer",) if arm.sharded else ("params", "optimizer")
        kept = [(other, one.prediction) for other in arm.same_state for one in other.traced.values() if one.prediction]
        floors = [float(sum(one.categories.get(name, 0) for name in fixed)) for _, one in kept]
        alike = knobs.update_settings(arm.settings)  # under FSDP the number of micro-steps, one or several, matters too
        floors += [
            UPDATE_PEAK_SHARE * one.update_peak_bytes
            for other, one in kept
            if knobs.update_settings(other.settings) == alike
            and (other.single_micro_step == arm.single_micro_step or not arm.sharded)
        ]
        further = (item for other in arm.stronger for item in other.traced.items())
        saving = [MIN_MEMORY_RATIO * (one.allocated or 0) for known, one in further if known <= size]
        found = self._estimate(arm, size)
        return max([arm.floor, *floors, *saving, found.allocated if found else 0.0])

    def _estimate(self, arm: PlanFamily, size: int) -> Estimate | None:
        if not arm.bracketing:
            return self._from(arm.same_settings, size)
        none, full = (self._from(end, size) for end in arm.bracketing)
        if none is None or full is None:
            return None
        part = arm.settings[knobs.CHECKPOINTING]
        allocated = max(full.allocated, none.allocated - part * none.growing)
        reserved = none.reserved + part * (full.reserved - none.reserved)
        step_ms = none.step_ms + part * (full.step_ms - none.step_ms)
        # Proportional only if all blocks are equal: this ranks plans, but is no bound.
        return Estimate(full.allocated, (allocated + reserved) / 2, step_ms)

    def _from(self, arms: Sequence[PlanFamily], samples: int) -> Estimate | None:
        known = {count: one.prediction for arm in arms for count, one in arm.traced.items() if one.prediction}
        below = max((one for one in known if one <= samples), default=None)
        above = min((one for one in known if one >= samples), default=None)
        ends = [(one, known[one]) for one in (below, above) if one is not None]
        if not ends:
            return None
        (first, small), (last, large) = ends[0], ends[-1]
        # Assume that growing memory is proportional to the micro-batch, and at least that of a smaller micro-batch.
        constant = sum(size for name, size in large.categories.items() if name not in PER_SAMPLE_CATEGORIES)
        growing = large.allocated - constant
        grown = growing * (samples / last - 1) if last else 0.0
        allocated, reserved = large.allocated + min(0.0, grown), large.reserved + grown
        each = [(one.cost.work_ms - one.cost.update_ms) / self._micro_steps(count) for count, one in ends]
        micro_step = each[0] * (samples / last if last else 1.0) * min(1.0, self.padding[samples] / self.padding[last])
        if last > first:
            part = (samples - first) / (last - first)
            allocated = max(allocated, small.allocated)
            # A peak that is constant for small micro-batches makes the line through both ends an upper bound.
            line = small.reserved + part * (large.reserved - small.reserved)
            reserved = (max(reserved, small.reserved) + line) / 2
            micro_step = each[0] + part * (each[1] - each[0])
        step_ms = min(one.cost.update_ms for _, one in ends) + self._micro_steps(samples) * micro_step
        if last > samples > first:  # the same for time: more micro-steps are not faster
            step_ms = (step_ms + min(step_ms, large.cost.work_ms)) / 2
        return Estimate(allocated, reserved, step_ms, growing + grown)

    def _micro_steps(self, samples: int) -> int:
        return -(-(self.arms[0].micro_batch_sizes[0] or 1) // samples) if samples else 1

    def _trace(self, upcoming: Callable[[], list[tuple[PlanFamily, int]]]) -> None:
        """Trace the first of the ``upcoming`` plans whenever a core is free, until there are none."""
        running: dict[int, tuple[PlanFamily, int, Plan]] = {}
        numbers = count()

        def jobs() -> Iterator[Callable[[], Any] | None]:
            while True:
                busy = [arm for arm, _, _ in running.values()]
                free = [(arm, size) for arm, size in upcoming() if arm not in busy]
                if not running and not free:
                    return
                # The first is traced alone: it rules out others, and if it cannot be traced, none can.
                if not free or (running and not any(arm.traced for arm in self.arms)):
                    yield None
                    continue
                arm, size = free[0]
                settings = with_size(arm.settings, size)
                try:
                    plan = self._plan(settings)
                except RecipeError as error:
                    self._take(arm, size, self._refuse(settings, error))
                    continue
                running[next(numbers)] = (arm, size, plan)
                yield self._job(settings, plan)

        for number, result in run_in_children(jobs()):
            arm, size, plan = running.pop(number)
            self._take(arm, size, self._answer(with_size(arm.settings, size), plan, result, len(running)))

    def _take(self, arm: PlanFamily, size: int, found: Candidate | Exception) -> None:
        if isinstance(found, Candidate):
            arm.traced[size] = found
        elif not isinstance(found, ChildError):
            self._rule_out(arm, str(found))
        elif not any(one.traced for one in self.arms):  # tracing other plans of the strategy would fail as well
            for other in self.arms:
                other.failed |= other.settings.get(STRATEGY) == arm.settings.get(STRATEGY)
            if all(other.failed for other in self.arms):
                self._give_up([f"the model cannot be traced, and no other plan was tried: {found}"])
        elif len(arm.micro_batch_sizes) > 1 and (arm.traced or not arm.partly_untraceable):  # try one more size
            arm.micro_batch_sizes.remove(size)
            arm.partly_untraceable = True
        else:
            arm.failed = True

    def _rule_out(self, arm: PlanFamily, reason: str) -> None:
        """Give up ``arm``, and all arms with the same value if the reason names a setting that is always rejected."""
        arm.failed = True
        for key, value in arm.settings.items():
            if reason.startswith(f"{key}={as_text(value)} "):
                for other in self.arms:
                    other.failed |= other.settings.get(key, ...) == value

    def _answer(self, settings: Settings, plan: Plan, result: Any, left: int) -> Candidate | Exception:
        """Return the candidate from the ``result`` of a job, with ``left`` other calls running."""
        self.done += 1
        failed = isinstance(result, Exception)
        found = self._refuse(settings, result, plan.describe()) if failed else self._candidate(settings, plan, result)
        known = [*(one for arm in self.arms for one in arm.traced.values()), found]
        fitting = [one for one in known if isinstance(one, Candidate) and one.rank_ms < inf]
        so_far = f"best so far: {values_text(min(fitting, key=_rank))}" if fitting else "none fits so far"
        self.progress(self.done, self.done + left, f"{plan.describe()}; {so_far}")
        return found

    def _job(self, settings: Settings, plan: Plan) -> Callable[[], Any]:
        fixed: dict[str, Any] = {"target": self.target, "nodes": self.nodes, "timeline": True, "capacity": self.limit}
        recipe = knobs.apply_settings(self.recipe, settings)
        return partial(predict_in_process, recipe, plan, **fixed, columns=self.keeps_columns)

    def _refuse(self, settings: Settings, error: Exception, description: str = "") -> Exception:
        self.refused.append(Candidate(settings, description, reason=str(error).splitlines()[0]))
        return error

    def _candidate(self, settings: Settings, plan: Plan, fields: dict[str, Any]) -> Candidate:
        found = Prediction.from_child(fields)
        self.notes |= dict.fromkeys(found.notes)
        if found.guesses:
            self.notes[f"{found.guesses} values were guessed, because they depend on weights or data"] = None
        values = (found.allocated, found.reserved, found.host, found.cost.step_ms)
        if found.expandable_segments != self.target.expandable_segments:
            settings = settings | {"memory.expandable_segments": found.expandable_segments}
            plan = self._plan(settings)
        return Candidate(settings, plan.describe(), *values, found.fits, prediction=found)

    def _plan(self, settings: Mapping[str, Any]) -> Plan:
        return decide_plan(knobs.apply_settings(self.recipe, settings), self.devices)

    def _ordered(self, everything: bool) -> list[Candidate]:
        """Return all candidates with their reasons: first the fastest that fits, or else the smallest."""
        traced = sorted((one for arm in self.arms for one in arm.traced.values()), key=_rank)
        between = [one for arm in self._whole for one in self._interpolated(arm)] if everything else []
        others = sorted([*traced[1:], *between], key=_rank)
        return [dataclasses.replace(one, reason=self._reason(one, traced[0])) for one in (*traced[:1], *others)]

    def _interpolated(self, arm: PlanFamily) -> Iterator[Candidate]:
        for size in arm.micro_batch_sizes:
            found = self._estimate(arm, size) if size not in arm.traced else None
            if found is not None:
                settings = with_size(arm.settings, size)
                traced = [item for other in arm.same_settings for item in other.traced.items()]
                host = min((abs(known - size), one.host or 0) for known, one in traced)[1]
                values = (round(found.allocated), round(found.reserved), host, found.step_ms)
                fits = found.reserved <= self.limit
                yield Candidate(settings, self._plan(settings).describe(), *values, fits, traced=False)

    def _reason(self, one: Candidate, first: Candidate) -> str:
        over = (one.reserved or 0) - self.budget
        if one.retries is None:
            near = f"within the budget, but not within the margin of {100 * BUDGET_MARGIN:g} %"
            return f"{format_bytes(over)} more than the budget" if over > 0 else near
        held = f"{format_bytes(-over)} of the budget stays free"
        if one.retries and one.prediction:
            held = f"tensors need {format_bytes(one.allocated or 0)}; releasing torch's cache is assumed to take "
            held += f"{one.prediction.cost.retry_ms:.1f} ms per step"
        if one is first:
            return f"fastest plan that {Retries(one.retries)}; {held}"
        return f"{Retries(one.retries)}, {one.slowdown_text(first)}{f'; {held}' if one.retries else ''}"

    def _smaller_at_a_loss(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Predict each lossy setting that the recipe does not use, with the smallest plan that it works with."""
        wanted: list[Settings] = []
        for step in knobs.lossy_steps(self.recipe):
            possible = (self._with_lossy_step(dict(one.flags), step) for one in candidates)
            wanted += [settings for settings in possible if settings][:1]
        plans = list(map(self._plan, wanted))
        found: dict[int, Candidate | Exception] = {}
        for number, result in run_in_children(list(map(self._job, wanted, plans))):
            found[number] = self._answer(wanted[number], plans[number], result, 0)
        return [one for _, one in sorted(found.items()) if isinstance(one, Candidate)]

    def _with_lossy_step(self, settings: Settings, step: Settings) -> Settings | None:
        for extra in (step, {key: value for key, value in step.items() if key not in IMPLIED_NAMES}):
            with suppress(RecipeError):
                self._plan(settings | extra)
                return settings | extra
        return None


def _rank(candidate: Candidate) -> tuple[float, int, int]:
    """Sort key: plans that run by time, then the others by memory; of equal ones the fewest knobs first."""
    size = (candidate.reserved or 0) * (candidate.rank_ms == inf)
    return candidate.rank_ms, size, len(knobs.non_default_settings(candidate.flags))


def with_size(settings: Mapping[str, Any], size: int) -> Settings:
    """Return the settings with a micro-batch of ``size``; 0 leaves it to the recipe."""
    return dict(settings) | ({"memory.micro_batch_size": size} if size else {})
