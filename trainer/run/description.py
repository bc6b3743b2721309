"""The lines that a run prints before training: plan, sizes, memory estimate, and warnings about its settings."""

from __future__ import annotations

import dataclasses

import torch

from trainer.engine.cut import data_parallel_rank, padding_share
from trainer.engine.loop import count_steps
from trainer.engine.window import Windows
from trainer.memory.knobs import HALF_TRUE
from trainer.memory.plan import CUT_MATTERS, Plan, count_noun
from trainer.memory.stack import PreparedModel
from trainer.planner.predict import faster
from trainer.recipe import Recipe
from trainer.run.run_prediction import PATIENCE
from trainer.run.session import Session
from trainer.weights.nf4 import count_weights


def describe_run(session: Session, stack: PreparedModel, windows: Windows) -> list[str]:
    """Return one line each for the plan, the size of model and run, warnings, the estimate and padding."""
    device, recipe = session.fabric.device, session.recipe
    on_gpu = device.type == "cuda"
    steps = count_steps(windows, recipe.epochs, recipe.max_steps)
    blocks = f" (blocks: {stack.blocks})" if stack.blocks else ""
    size = f"{count_weights(stack.module)}{blocks}; {windows.size:,} samples, {steps:,} steps"
    where = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    lines = [f"plan: {session.plan.describe()} on {where}", f"{type(recipe.model).__name__}: {size}"]
    nonsense = suspicious_settings(recipe, session.plan, windows.size, steps)
    warnings = [*plan_warnings(recipe, on_gpu), *nonsense, idle_ranks(session.plan), stack.warning]
    lines += [f"warning: {text}" for text in warnings if text is not None]
    if session.forecast is not None:
        lines += session.forecast.lines(PATIENCE if session.forecast.first else 0.0)
        lines += faster(recipe, session.plan.world_size, session.forecast.device, session.forecast.prediction)
    if windows.packs:  # also for streamed texts, whose lengths are unknown
        lines.append("padding: none, the model computes on real tokens only (model.padding_free)")
    elif windows.lengths is not None:
        drawn, cut = (f"{100 * share:.1f} %" for share in padding_shares(windows))
        lines.append(f"{cut} of the tokens are padding ({drawn} without grouping by length)")
    return lines


def suspicious_settings(recipe: Recipe, plan: Plan, samples: int, steps: int) -> list[str]:
    """Return warnings, one line each, about settings that work but are probably not intended."""
    found, batch, warmup = [], plan.initial_cut.batch_size, recipe.optim.warmup_steps
    shares = data_parallel_rank(recipe.memory, 0, plan.world_size)[1]
    if batch > samples:
        found.append(f"batch_size={batch} is larger than the {samples:,} training samples: every step uses all of them")
    if 0 < steps <= warmup:
        lr = f"the learning rate never reaches optim.lr={recipe.optim.lr:g}"
        found.append(f"optim.warmup_steps={warmup}, but the run ends after {steps:,} steps: {lr}")
    if min(batch, samples) < shares:
        idle = f"{shares - min(batch, samples)} of {shares} ranks are idle in every step"
        found.append(f"batch_size={batch} has fewer samples than ranks: {idle}; use fewer ranks or a larger batch")
    if plan.memory.cpu_offload == "optimizer" and plan.strategy == "ddp" and shares > 1:
        found.append("cpu_offload=optimizer with ddp: every rank holds all masters; memory.strategy fsdp shards them")
    if recipe.run.evaluate and recipe.data.val is None and recipe.data.test is None:
        fix = "--data.val_fraction 0.1 holds out a tenth of the training set"
        fix = fix if recipe.data.val_fraction is not None else f"set {type(recipe.data).__name__}.val in prepare()"
        found.append(f"no evaluation: the data has neither a validation set nor a test set; {fix}")
    return found


def padding_shares(windows: Windows) -> tuple[float, float]:
    """Return the share of padding in the first epoch without and with grouping by length."""
    assert windows.lengths is not None
    shares = []
    for cut in (dataclasses.replace(windows, lengths=None), windows):
        pieces = [piece for step in range(windows.steps(0)) for piece in cut.pieces(0, step)]
        shares.append(padding_share(pieces, windows.lengths))
    return shares[0], shares[1]


def plan_warnings(recipe: Recipe, on_gpu: bool) -> list[str]:
    """Return warnings to show before training with this plan, one line each."""
    memory = recipe.memory
    found = [CUT_MATTERS.format(type(recipe.model).__name__)] if recipe.model.samples_interact else []
    if memory.precision in HALF_TRUE and memory.cpu_offload != "optimizer" and not memory.stochastic_rounding:
        lost = f"memory.precision={memory.precision} loses updates that are smaller than the rounding of a weight"
        rate = f"At lr 1e-5 AdamW loses most of them, and lr is {recipe.optim.lr:g}"
        fix = "use memory.stochastic_rounding true, memory.cpu_offload optimizer (fp32 master weights) or bf16-mixed"
        found.append(f"{lost}. {rate}: {fix}")
    if memory.matmul_precision != "highest" and (not on_gpu or memory.precision.endswith("-mixed")):
        key = f"memory.matmul_precision={memory.matmul_precision}"
        mixed = f"{key} rounds products of fp32, but memory.precision={memory.precision} computes almost none in fp32"
        effect = "rounds only with bfloat16 units (AMX)" if memory.matmul_precision == "medium" else "has no effect"
        found.append(mixed if on_gpu else f"{key} is for GPUs: on a CPU it {effect}")
    if memory.compile == "cuda_graphs":
        fact = "not yet tested on a GPU: compare the losses with memory.compile blocks"
        found.append(f"memory.compile=cuda_graphs: {fact if on_gpu else 'on a CPU it is the same as blocks'}")
    if not on_gpu and (memory.cpu_offload != "none" or memory.activation_offload):
        key = "activation_offload" if memory.cpu_offload == "none" else f"cpu_offload={memory.cpu_offload}"
        effect = "the result is correct, but no memory is saved"
        found.append(f"memory.{key} moves data to host memory, where this run already computes: {effect}")
    return found


def idle_ranks(plan: Plan) -> str | None:
    """Return a warning if ``run.deterministic`` leaves ranks idle in a full batch, otherwise ``None``."""
    cut = plan.initial_cut
    pieces = -(-cut.batch_size // cut.micro_batch_size)
    idle = -pieces % plan.world_size
    if not plan.deterministic or cut.micro_batch_tokens is not None or not idle:
        return None
    fix = "use a smaller memory.micro_batch_size" if cut.micro_batch_size > 1 else "use fewer ranks"
    count = count_noun(pieces, "micro-batch", "es")
    cause = f"run.deterministic cuts a batch of {cut.batch_size} into {count} regardless of the number of ranks"
    return f"{cause}, so {idle} of {plan.world_size} ranks are idle in the last micro-step: {fix}"
