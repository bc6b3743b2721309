"""The table of memory knobs: their values, effects, and what they cannot be combined with. Imports no torch.

The plan, the planner, the advice after an out-of-memory error, the ladder and the tests read this table. A new
technique takes four files: a field of ``recipe.Memory``, a row here, a file next to this one, and its call in
``stack.py``. Checks that concern the strategy, the state or several knobs are in ``refusals.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trainer.recipe import Memory, Recipe

if TYPE_CHECKING:
    from trainer.engine.window import Cut

Phases = tuple[str, ...]
GRAPH: Phases = ("forward", "backward")
FORWARDS: Phases = (*GRAPH, "evaluation")
OPTIMIZER: Phases = (*FORWARDS, "step")
ALL: Phases = ("init", *OPTIMIZER)

ADAM = ("adam", "adamw")
HALF = ("bf16-true", "16-true")


@dataclass(frozen=True)
class Turn:
    """One value of a knob that is worth trying by itself."""

    value: Any  # the value of the field of ``Memory``
    lowers: Phases = ()  # phases whose peak it can lower; recommended if memory runs out in one of them
    rung: str = ""  # name of the rung of the ladder that measures it
    stacked: bool = False  # whether the ladder also measures it on top of all stacked rungs before it
    unless: tuple[Any, ...] = ()  # current values of the field from which this value is not an improvement
    needs_gpu: bool = False  # whether it is useful on a GPU only
    along: Mapping[str, Any] = field(default_factory=dict)  # other fields that a search sets with it, if accepted


@dataclass(frozen=True)
class Knob:
    """A field of ``Memory`` that selects a technique, with everything that other code must know about it."""

    name: str  # name of the field
    values: tuple[Any, ...] = ()  # the default first, then the fastest first; empty if any number is valid
    words: str = ""  # description in a plan that uses it; ``{}`` is its value
    turns: tuple[Turn, ...] = ()  # values to try by themselves, the cheapest first
    planned: bool = False  # whether the planner decides it if the recipe leaves it open
    graded: bool = True  # whether each of ``values`` computes or moves more than the one before: it can only be slower
    lossy: bool = False  # whether it changes the result: the planner uses it only if the recipe allows it
    to_host: bool = False  # whether it moves memory to the host: no gain if the host is the device
    needs_ranks: bool = False  # whether it has no effect on one rank
    optimizers: tuple[str, ...] = ()  # the optimizers that support it; empty for all
    off: tuple[Any, ...] = ()  # other values with the effect of the default
    column: str = ""  # its column in the planner's table; for lossy knobs, the text in their common column
    note: str = ""  # shown if a search has chosen it
    null: Any = None  # the value that null stands for in a plan
    evaluated: bool = False  # whether evaluations use it as training does
    only_with: str = ""  # the knob without which it has no effect
    splits: bool = True  # whether it is verified with weights that ``tensor_parallel`` splits
    one_by_one: bool = False  # whether the optimizer updates parameters one at a time
    one_micro_batch: bool = False  # whether a step must be a single micro-batch
    overlaps: bool = False  # whether with FSDP it may be faster or slower, because updates overlap communication
    lasting: Literal["state", "update", "forward"] = "state"
    """The memory that it changes: that of weights and optimizer state, or only that of updates, or of forwards."""
    pays: Callable[[Memory, int], bool] = lambda memory, ranks: True  # if used: whether a search should consider it
    conflicts: Callable[[Recipe, int, Sequence[Cut]], Iterator[str]] = lambda recipe, ranks, cuts: iter(())
    """Messages for the settings that it cannot be combined with; called if it is used. See ``require_compatible``."""

    @property
    def reach(self) -> int:
        """The number of phases whose peak it can lower."""
        return max((len(turn.lowers) for turn in self.turns), default=0)

    def is_on(self, memory: Memory) -> bool:
        """Return whether ``memory`` uses a value that has another effect than the default."""
        return getattr(memory, self.name) not in (self.values[0], *self.off)


def is_sharded(memory: Memory, ranks: int = 2) -> bool:
    """Return whether FSDP shards the weights over ``ranks``, or streams them."""
    return memory.cpu_offload == "parameters" or (memory.strategy == "fsdp" and ranks > 1)


def _in_backward(recipe: Recipe, world_size: int, cuts: Sequence[Cut]) -> Iterator[str]:
    memory, key, most = recipe.memory, "memory.optimizer_in_backward", max(cut.accumulate for cut in cuts)
    if recipe.optim.clip_norm is not None:
        yield f"{key} updates weights before the norm of all gradients is known: leave optim.clip_norm at null"
    if most > 1 or memory.micro_batch_tokens is not None:
        fix = "accumulate 1" + (" and no memory.micro_batch_tokens" if memory.micro_batch_tokens else "")
        yield f"{key} updates weights in every backward, and a batch of {most} micro-batches has several: use {fix}"
    if len(recipe.model.loss_names) > 1:
        yield f"{key} updates weights in every backward, and {type(recipe.model).__name__} has several losses per batch"
    if memory.precision in ("16-mixed", "16-true"):
        yield f"{key} cannot skip a step whose fp16 gradients overflow: use bf16-mixed or 32-true"
    if world_size > 1 and memory.strategy != "fsdp":
        yield f"{key} would update weights before DDP reduces their gradients: use memory.strategy fsdp, or one rank"
    if memory.cpu_offload != "none":
        yield f"{key} frees gradients that memory.cpu_offload={memory.cpu_offload} moves: use only one of the two"
    if memory.compile == "cuda_graphs":
        yield f"memory.compile=cuda_graphs replays code that {key}=true interrupts: use memory.compile blocks"
    if recipe.run.deterministic:
        yield f"run.deterministic=true needs the norm before the update, not after, as {key}=true: use false"


MIXED = (
    Turn("bf16-mixed", FORWARDS, "bf16-mixed", stacked=True, unless=("16-mixed", *HALF)),
    Turn("16-mixed", rung="16-mixed", needs_gpu=True),
)
CHECKPOINTING = (
    Turn("selective", rung="selective-checkpointing"),
    Turn("full", GRAPH, "full-checkpointing", stacked=True, unless=(1,)),
)
ACTIVATIONS = (Turn(True, GRAPH, "activation-offload", stacked=True),)
OFFLOAD = (
    Turn("optimizer", OPTIMIZER, "optimizer-offload", stacked=True, unless=("parameters",)),
    Turn("parameters", ALL, "parameter-offload", stacked=True),
)
IN_BACKWARD = (Turn(True, rung="optimizer-in-backward"),)
BITS = (Turn(8, OPTIMIZER, "8-bit-state", unless=(4,)), Turn(4, OPTIMIZER, unless=(32,)))
TF32 = ("highest", "high", "medium")
IN_TF32 = (Turn("high", needs_gpu=True), Turn("medium", needs_gpu=True))
IN_HALF = (
    Turn("bf16-true", ALL, "bf16-true", unless=("16-mixed", "16-true"), along={"stochastic_rounding": True}),
    Turn("16-true", ALL, unless=("32-true", "64-true", "bf16-mixed", "bf16-true")),
)
LOSSY_STATE: Any = {"lossy": True, "optimizers": ADAM, "splits": False}
OVER_RANKS: Any = {"graded": False, "needs_ranks": True, "evaluated": True}
KNOBS = (  # in the order in which to try them
    Knob("micro_batch_size", planned=True),
    Knob("micro_batch_tokens", evaluated=True),
    Knob("precision", ("32-true", "64-true", "bf16-mixed", "16-mixed"), turns=MIXED),
    Knob(
        "activation_checkpointing",
        ("none", "selective", "full"),  # and any fraction of the blocks
        "{} checkpointing",
        CHECKPOINTING,
        planned=True,
        off=(0,),
        column="checkpointing",
        lasting="forward",
    ),
    Knob(
        "activation_offload",
        (False, True),
        "activations offloaded",
        ACTIVATIONS,
        planned=True,
        to_host=True,
        splits=False,
        lasting="forward",
        # With a fraction of the blocks checkpointed, only the activations of the other blocks could be offloaded.
        pays=lambda memory, ranks: not isinstance(memory.activation_checkpointing, float),
    ),
    Knob("strategy", ("ddp", "fsdp"), turns=(Turn("fsdp", ALL),), planned=True, **OVER_RANKS),
    Knob("tensor_parallel", (1,), "tensor parallel over {} ranks", **OVER_RANKS),
    Knob("sequence_parallel", (False, True), "sequence parallel", only_with="tensor_parallel", **OVER_RANKS),
    Knob("replicas", (1, 2), "{} replicas", planned=True, splits=False, pays=is_sharded, **OVER_RANKS),
    Knob(
        "reshard_after_forward",
        (True, False),  # false is faster, and needs more memory
        "whole weights kept until backward",
        planned=True,
        graded=False,
        lasting="update",
        pays=lambda memory, ranks: is_sharded(memory, ranks) and memory.cpu_offload != "parameters",
    ),
    Knob(
        "sync_every_micro_step",
        (None, True, False),
        "sync every micro-step",
        planned=True,
        needs_ranks=True,
        off=(False,),
        lasting="update",
        pays=lambda memory, ranks: is_sharded(memory, ranks) and memory.cpu_offload == "none",  # null includes offload
    ),
    Knob(
        "cpu_offload",
        ("none", "optimizer", "parameters"),
        "{} offloaded",
        OFFLOAD,
        planned=True,
        to_host=True,
        splits=False,
        one_by_one=True,
        pays=lambda memory, ranks: memory.strategy != "ddp" or memory.cpu_offload != "parameters",  # FSDP streams
    ),
    Knob(
        "optimizer_in_backward",
        (None, True, False),
        "optimizer in backward",
        IN_BACKWARD,
        planned=True,
        off=(False,),
        column="in backward",
        note="memory.optimizer_in_backward: a step that is not finite ends the run, and running out of memory is not "
        "recovered from: --memory.optimizer_in_backward false keeps both",
        null=False,
        splits=False,
        one_by_one=True,
        one_micro_batch=True,
        overlaps=True,
        lasting="update",
        pays=lambda memory, ranks: (
            not memory.sync_every_micro_step
            and memory.cpu_offload == "none"
            and (ranks == 1 or is_sharded(memory, ranks))
        ),
        conflicts=_in_backward,
    ),
    Knob("optimizer_state_bits", (32, 8, 4), "{}-bit optimizer state", BITS, column="{}-bit", **LOSSY_STATE),
    Knob("stochastic_rounding", (False, True), "stochastic rounding", optimizers=ADAM, splits=False),
    Knob("precision", HALF, turns=IN_HALF, lossy=True, column="{}", evaluated=True),  # casts the weights as well
    # Saves time, not memory.
    Knob("matmul_precision", TF32, "{} matmul precision", IN_TF32, lossy=True, column="{} matmuls", evaluated=True),
    Knob("init", ("device", "meta"), "{} init"),
    Knob("compile", ("none", "blocks", "model", "cuda_graphs"), "compiled {}", splits=False),
)

SEARCHED = tuple(sorted((k for k in KNOBS if k.planned and k.values), key=lambda knob: -knob.reach))
"""The lossless knobs that a search tries; those that lower the most phases come first."""

UNPROVEN = tuple(knob.name for knob in KNOBS if not knob.splits)
"""Knobs not yet verified with weights that ``tensor_parallel`` splits."""

EVALUATED = tuple(dict.fromkeys(knob.name for knob in KNOBS if knob.evaluated))
"""Knobs that an evaluation uses as training does."""

ONE_MICRO_BATCH = tuple(f"memory.{knob.name}" for knob in KNOBS if knob.one_micro_batch)

LOSSY = tuple(sorted((k for k in KNOBS if k.lossy), key=lambda knob: -knob.reach))

TOGETHER = {f"memory.{k.name}": tuple(f"memory.{name}" for name in t.along) for k in KNOBS for t in k.turns if t.along}
FOLLOWERS = {name for names in TOGETHER.values() for name in names}
"""Settings that a search changes only along with another one: by that one, and all of them."""


def turned_off(name: str) -> dict[str, Any]:
    """Return the default values of the knob ``name`` and of those that have no effect without it."""
    return {knob.name: knob.values[0] for knob in KNOBS if name in (knob.name, knob.only_with)}


def left_open(memory: Memory) -> list[str]:
    """Return the knobs at ``auto`` that only the planner can decide."""
    names = [knob.name for knob in KNOBS if knob.planned and knob.values and knob.name != "strategy"]
    return [name for name in names if getattr(memory, name) == "auto"]


def described(memory: Memory) -> list[str]:
    """Describe the knobs that differ from their defaults."""
    words = {knob.name: knob for knob in KNOBS if knob.words}
    kept = memory.activation_checkpointing
    shown = {"activation_checkpointing": kept if isinstance(kept, str) else f"{100 * kept:g} %"}
    return [
        words[name].words.format(shown.get(name, value))
        for name, value in vars(memory).items()
        if name in words and value not in (words[name].values[0], *words[name].off)
    ]
