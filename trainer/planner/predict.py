"""Predict the memory and time of one plan on a GPU: trace it, replay the allocator and estimate the cost."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from trainer.contract import Data, Plannable, Preparable, capability, prepare_data, without_weights
from trainer.engine.data_feed import fill_from_data
from trainer.errors import RecipeError, require
from trainer.fakegpu.allocator import AllocatorSettings
from trainer.fakegpu.gpus import GPU
from trainer.fakegpu.network import Cluster, Interconnect
from trainer.fakegpu.prediction import Prediction, predict_from_trace
from trainer.fakegpu.snapshot import event_columns
from trainer.fakegpu.target import Target
from trainer.memory.plan import Plan, decide_plan
from trainer.planner.knobs import apply_settings
from trainer.planner.synthetic_data import SyntheticData
from trainer.planner.traced_run import draw_samples, trace_run
from trainer.recipe import Memory, Recipe

MIN_GAIN = 0.1  # share of a step's time that a setting must save to be suggested
FASTER = {"precision bf16-mixed": "bfloat16", "matmul_precision high": "tfloat32", "compile blocks": None}
"""Settings of ``memory`` that may be faster, with the units that then compute fp32 products."""


def prepare_recipe(recipe: Recipe, outlines: bool = False) -> Recipe:
    """Return the recipe with prepared data and the model filled from it; no weights are downloaded or read.

    With ``outlines``, missing data is replaced by synthetic samples from its spec, as ``notes`` say, and a text
    model needs no tokenizer."""
    recipe.data.use_model(recipe.model)
    spec = recipe.data.spec() if outlines else None
    recipe.data.require_files()
    try:
        model = recipe.model
        if spec is not None and isinstance(model, Plannable):
            model = model.for_spec(spec)
        bare = capability(without_weights(model), Preparable)
        bare.prepare()
    except RecipeError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        needed = "give a folder with config.json as model.name and one with the tokenizer as model.tokenizer"
        if spec is not None:
            needed = "give a folder with config.json as model.name, or a model type such as distilbert"
        raise RecipeError(f"{error}. A plan needs no weights: {needed}") from error
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked children must not wait for its threads
    data = recipe.data if spec is None else SyntheticData(spec, recipe.data)
    try:
        prepare_data(data, recipe.model, bare.tokenizer_or_none())
    except (RecipeError, OSError) as error:
        if not outlines or type(data).spec is not Data.spec or type(data).__module__.startswith("trainer."):
            raise
        fix = f"to plan without the data, define spec() in {type(data).__name__} (docs/your-own-model.md)"
        raise RecipeError(f"{type(data).__name__}: {error}; {fix}") from error
    require(len(data.train) > 0, "the training set is empty")
    return recipe.replace(model=fill_from_data(model, data), data=data)


def predict_in_process(
    recipe: Recipe,
    plan: Plan,
    target: Target,
    nodes: int = 1,
    timeline: bool = False,
    interconnects: Sequence[Interconnect] = (),
    capacity: int | None = None,
    priced: bool = True,
    columns: bool = False,
) -> dict[str, Any]:
    """Return the fields of a :class:`Prediction`, in JSON types. Call it in a child process: it changes torch.

    Only the first rank is traced. ``recipe`` is from :func:`prepare_recipe`. ``interconnects`` are compared, by default
    that of ``target``. ``retries`` are counted for a ``capacity`` in bytes. Times are 0 if it is not ``priced``, which
    may save a third of the work.
    """
    began = time.perf_counter()
    samples = draw_samples(recipe, plan)
    trace = trace_run(recipe, plan, samples, target, nodes, priced)
    cluster, asked = Cluster(plan.world_size, nodes), plan.memory.expandable_segments
    settings = AllocatorSettings(target.expandable_segments if asked is None else asked)
    may_expand = asked is None and recipe.memory.budget is not None
    units = {flag: FASTER[flag] for flag in candidates(recipe, plan.world_size, target.gpu)}
    run = (trace, target, cluster, interconnects or [target.network], capacity, settings)
    found = predict_from_trace(*run, may_expand=may_expand, timeline=timeline, units=units)
    of_each = samples.first.tokens or samples.first.samples
    if columns:
        found["columns"] = event_columns({plan.initial_cut.micro_batch_size: trace})
    return found | {"seconds": time.perf_counter() - began, "peak_seconds": found["peak_seconds"] / of_each}


def candidates(recipe: Recipe, ranks: int, gpu: GPU) -> list[str]:
    """Return the settings of ``FASTER`` that are at their default, supported by ``gpu`` and valid for the recipe."""
    memory, found = recipe.memory, []
    for flag, units in FASTER.items():
        key, value = flag.split()
        able = memory.precision == "32-true" and units in gpu.flops if units else gpu.name != "cpu"
        with suppress(RecipeError):
            if able and getattr(memory, key) == getattr(Memory(), key):
                decide_plan(apply_settings(recipe, {f"memory.{key}": value}), ranks)
                found.append(flag)
    return found


def faster(recipe: Recipe, ranks: int, gpu: GPU, found: Prediction | None) -> list[str]:
    """Suggest in a line the settings that save ``MIN_GAIN`` of a step; without a prediction, all ``candidates``."""
    known = found.faster if found else dict.fromkeys(candidates(recipe, ranks, gpu), 0.0)
    now = found.cost.step_ms if found else math.inf
    gains = sorted((ms, flag) for flag, ms in known.items() if ms <= (1 - MIN_GAIN) * now)
    names = [f"--memory.{flag}{f' ({ms:,.3g} ms)' if found else ''}" for ms, flag in gains]
    about = f"than {now:,.3g} ms per step (estimate)" if found else "perhaps"
    return [f"faster {about}, each on its own: {', '.join(names)}"] if names else []
