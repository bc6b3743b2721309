"""The plan: all memory settings of a run, decided."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from trainer.contract import Plannable, capability
from trainer.engine.cut import Cut, cut_at, data_parallel_rank
from trainer.errors import RecipeError, require
from trainer.memory.compatibility import require_compatible
from trainer.memory.knobs import EVALUATED, HALF_TRUE, KNOBS, describe_knobs, undecided_knobs
from trainer.recipe import Memory, Recipe, Strategy

CUT_MATTERS = (
    "{}.samples_interact: the loss of a sample depends on the other samples of its micro-batch. With another "
    "micro-batch size or number of ranks, the same batch has another gradient"
)

ROUNDED = {"high": "TF32", "medium": "bfloat16"}


@dataclass(frozen=True)
class Plan:
    """The decisions for a recipe on a given number of ranks."""

    memory: Memory  # no setting is open: strategy is single, ddp or fsdp, and optional booleans are true or false
    world_size: int  # ranks over all nodes
    initial_cut: Cut  # the cut of the batches of epoch 0; after a recovery, of the current epoch
    lossy: tuple[str, ...] = ()  # requested techniques that change the result beyond the order of summation
    deterministic: bool = False  # the same bits on any number of ranks: see engine/deterministic.py

    @property
    def strategy(self) -> Strategy:
        return self.memory.strategy

    def for_evaluation(self) -> Plan:
        """Return a plan with the same weights on the same ranks, without techniques for backward and optimizer."""
        streamed = self.memory.cpu_offload == "parameters"
        kept = {key: getattr(self.memory, key) for key in EVALUATED}
        return dataclasses.replace(self, memory=Memory(cpu_offload="parameters" if streamed else "none", **kept))

    def describe(self) -> str:
        cut, (_, shares) = self.initial_cut, data_parallel_rank(self.memory, 0, self.world_size)
        groups = count_noun(shares, "group", "s") + f" of {self.memory.tensor_parallel} ranks"
        ranks = groups if shares < self.world_size else count_noun(shares, "rank", "s")
        micro_batches = f"{count_noun(cut.accumulate, 'micro-batch', 'es')} of {cut.micro_batch_size}"
        batch = f"batch {cut.batch_size} = {ranks} × {micro_batches}"
        batch += f" of at most {cut.micro_batch_tokens} tokens" if cut.micro_batch_tokens else ""
        deterministic = ["the same bits on any number of ranks"] if self.deterministic else []
        words = [batch, self.strategy, self.memory.precision, *describe_knobs(self.memory), *deterministic]
        return ", ".join(words) + (f" (lossy: {', '.join(self.lossy)})" if self.lossy else "")


def count_noun(number: int, noun: str, plural: str) -> str:
    """Return a number with its noun, such as ``4 ranks``; ``plural`` is the ending of the plural."""
    return f"{number} {noun}{plural if number > 1 else ''}"


def with_precision(recipe: Recipe, capability: tuple[int, int]) -> Recipe:
    """Decide ``memory.precision=auto`` for a GPU of the CUDA ``capability``; (0, 0) stands for a CPU."""
    memory = dataclasses.replace(recipe.memory, precision="bf16-mixed" if capability >= (8, 0) else "32-true")
    return recipe.replace(memory=memory) if recipe.memory.precision == "auto" else recipe


def decide_plan(recipe: Recipe, world_size: int) -> Plan:
    """Decide all settings that the recipe leaves open, and reject settings that cannot be combined."""
    for name in undecided_knobs(recipe.memory):
        raise RecipeError(f"memory.{name}=auto needs the planner, which did not run: use trainer fit or trainer plan")
    require(recipe.memory.precision != "auto", "memory.precision=auto must be resolved first: call with_precision")
    epochs = sorted(recipe.accumulate) if isinstance(recipe.accumulate, dict) else [0]
    cuts = [cut_at(recipe, world_size, epoch) for epoch in epochs]  # every phase of a schedule is checked
    require_compatible(recipe, world_size, cuts)
    memory, deterministic = recipe.memory, recipe.run.deterministic
    strategy = memory.strategy
    if memory.cpu_offload == "parameters":
        strategy = "fsdp"  # streams the weights, also on one rank
    elif strategy == "auto":
        strategy = "ddp" if world_size > 1 else "single"
    every = memory.sync_every_micro_step
    if every is None:  # false would keep whole gradients on the device, and sum over micro-steps before ranks
        every = strategy == "fsdp" and (memory.cpu_offload != "none" or deterministic)
    nulls = {knob.name: knob.null for knob in KNOBS if knob.null is not None and getattr(memory, knob.name) is None}
    decided = dataclasses.replace(memory, strategy=strategy, sync_every_micro_step=every, **nulls)
    return Plan(decided, world_size, cuts[0], tuple(_lossy(recipe)), deterministic)


def _lossy(recipe: Recipe) -> list[str]:
    memory, found = recipe.memory, []
    if memory.precision in HALF_TRUE and memory.cpu_offload != "optimizer":
        found.append(f"{memory.precision} weights" + (" rounded at random" if memory.stochastic_rounding else ""))
    elif memory.precision == "16-true":
        found.append("16-true gradients without a loss scale")
    if memory.optimizer_state_bits < 32:
        found.append(f"{memory.optimizer_state_bits}-bit optimizer state")
    if memory.matmul_precision != "highest":
        found.append(f"fp32 products rounded to {ROUNDED[memory.matmul_precision]}")
    return [*found, *capability(recipe.model, Plannable).lossy]
