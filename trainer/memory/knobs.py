"""The table of memory knobs: their values and effects. Imports no torch.

The plan, the planner, the advice after an out-of-memory error, the ladder and the tests read this table. A new
technique takes four files: a field of ``recipe.Memory``, a row here, a file next to this one, and its call in
``stack.py``. ``compatibility.py`` has the settings that cannot be combined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.recipe import Memory

PhaseNames = tuple[str, ...]
GRAPH: PhaseNames = ("forward", "backward")
WITH_EVALUATION: PhaseNames = (*GRAPH, "evaluation")
OPTIMIZER: PhaseNames = (*WITH_EVALUATION, "step")
ALL: PhaseNames = ("init", *OPTIMIZER)

ADAM = ("adam", "adamw")
HALF_TRUE = ("bf16-true", "16-true")


@dataclass(frozen=True)
class KnobValue:
    """One value of a knob that is worth trying by itself."""

    value: Any  # the value of the field of ``Memory``
    lowers_peak_in: PhaseNames = ()  # phases whose peak it can lower; recommended if memory runs out in one of them
    ladder_name: str = ""  # name of the rung of the ladder that measures it
    stacks: bool = False  # whether the ladder also measures it on top of all stacked rungs before it
    not_with: tuple[Any, ...] = ()  # current values of the field from which this value is not an improvement
    needs_gpu: bool = False  # whether it is useful on a GPU only
    implies: Mapping[str, Any] = field(default_factory=dict)  # other fields that a search sets with it, if accepted


@dataclass(frozen=True)
class Knob:
    """A field of ``Memory`` that selects a technique, with everything that other code must know about it."""

    name: str  # name of the field
    values: tuple[Any, ...] = ()  # the default first, then the fastest first; empty if any number is valid
    description: str = ""  # how a plan that uses it describes it; ``{}`` is its value
    candidates: tuple[KnobValue, ...] = ()  # values to try by themselves, the cheapest first
    planned: bool = False  # whether the planner decides it if the recipe leaves it open
    monotonic: bool = True  # whether each of ``values`` takes more work, so more time, than the one before
    lossy: bool = False  # whether it changes the result: the planner uses it only if the recipe allows it
    to_host: bool = False  # whether it moves memory to the host, which saves nothing if the host is the device
    needs_ranks: bool = False  # whether it has no effect on one rank
    optimizers: tuple[str, ...] = ()  # the optimizers that support it; empty for all
    noop_values: tuple[Any, ...] = ()  # other values with the effect of the default
    column: str = ""  # its column in the planner's table; for lossy knobs, the text in their common column
    note: str = ""  # shown to the user if a search has chosen it
    null: Any = None  # the value that null stands for in a plan
    evaluated: bool = False  # whether evaluations use it as training does
    only_with: str = ""  # the knob without which it has no effect
    splits: bool = True  # whether it is verified with weights that ``tensor_parallel`` splits
    one_by_one: bool = False  # whether the optimizer updates parameters one at a time
    one_micro_batch: bool = False  # whether a step must be a single micro-batch
    overlaps: bool = False  # whether with FSDP it may be faster or slower, because updates overlap communication
    lasting: Literal["state", "update", "forward"] = "state"
    """Which memory it changes: ``state`` is that of weights and optimizer state, the others only their phase's."""
    pays: Callable[[Memory, int], bool] = lambda memory, ranks: True  # whether a search considers it, if it is on

    @property
    def num_phases(self) -> int:
        """The number of phases whose peak it can lower."""
        return max((len(turn.lowers_peak_in) for turn in self.candidates), default=0)

    def is_on(self, memory: Memory) -> bool:
        """Return whether ``memory`` uses a value that has another effect than the default."""
        return getattr(memory, self.name) not in (self.values[0], *self.noop_values)


def is_sharded(memory: Memory, ranks: int = 2) -> bool:
    """Return whether FSDP shards the weights over ``ranks``, or streams them."""
    return memory.cpu_offload == "parameters" or (memory.strategy == "fsdp" and ranks > 1)


MIXED = (
    KnobValue("bf16-mixed", WITH_EVALUATION, "bf16-mixed", stacks=True, not_with=("16-mixed", *HALF_TRUE)),
    KnobValue("16-mixed", ladder_name="16-mixed", needs_gpu=True),
)
BITS = (KnobValue(8, OPTIMIZER, "8-bit-state", not_with=(4,)), KnobValue(4, OPTIMIZER, not_with=(32,)))
TF32 = ("highest", "high", "medium")
IN_TF32 = (KnobValue("high", needs_gpu=True), KnobValue("medium", needs_gpu=True))
IN_HALF = (
    KnobValue("bf16-true", ALL, "bf16-true", not_with=("16-mixed", "16-true"), implies={"stochastic_rounding": True}),
    KnobValue("16-true", ALL, not_with=("32-true", "64-true", "bf16-mixed", "bf16-true")),
)
LOSSY_STATE: Any = {"lossy": True, "optimizers": ADAM, "splits": False}
OVER_RANKS: Any = {"monotonic": False, "needs_ranks": True, "evaluated": True}
OFFLOAD: Any = {"planned": True, "to_host": True, "splits": False}
OF_UPDATE: Any = {"planned": True, "lasting": "update"}
KNOBS = (  # in the order in which to try them
    Knob("micro_batch_size", planned=True),
    Knob("micro_batch_tokens", evaluated=True),
    Knob("precision", ("32-true", "64-true", "bf16-mixed", "16-mixed"), candidates=MIXED),
    Knob(
        "activation_checkpointing",
        ("none", "selective", "full"),  # and any fraction of the blocks
        "{} checkpointing",
        (
            KnobValue("selective", ladder_name="selective-checkpointing"),
            KnobValue("full", GRAPH, "full-checkpointing", stacks=True, not_with=(1,)),
        ),
        planned=True,
        noop_values=(0,),
        column="checkpointing",
        lasting="forward",
    ),
    Knob(
        "activation_offload",
        (False, True),
        "activations offloaded",
        (KnobValue(True, GRAPH, "activation-offload", stacks=True),),
        **OFFLOAD,
        lasting="forward",
        # With a fraction of the blocks checkpointed, only the activations of the other blocks could be offloaded.
        pays=lambda memory, ranks: not isinstance(memory.activation_checkpointing, float),
    ),
    Knob("strategy", ("ddp", "fsdp"), candidates=(KnobValue("fsdp", ALL),), planned=True, **OVER_RANKS),
    Knob("tensor_parallel", (1,), "tensor parallel over {} ranks", **OVER_RANKS),
    Knob("sequence_parallel", (False, True), "sequence parallel", only_with="tensor_parallel", **OVER_RANKS),
    Knob("replicas", (1, 2), "{} replicas", planned=True, splits=False, pays=is_sharded, **OVER_RANKS),
    Knob(
        "reshard_after_forward",
        (True, False),  # false is faster, and needs more memory
        "whole weights kept until backward",
        **OF_UPDATE,
        monotonic=False,
        pays=lambda memory, ranks: is_sharded(memory, ranks) and memory.cpu_offload != "parameters",
    ),
    Knob(
        "sync_every_micro_step",
        (None, True, False),
        "sync every micro-step",
        **OF_UPDATE,
        needs_ranks=True,
        noop_values=(False,),
        # With offloading, null already means true.
        pays=lambda memory, ranks: is_sharded(memory, ranks) and memory.cpu_offload == "none",
    ),
    Knob(
        "cpu_offload",
        ("none", "optimizer", "parameters"),
        "{} offloaded",
        (
            KnobValue("optimizer", OPTIMIZER, "optimizer-offload", stacks=True, not_with=("parameters",)),
            KnobValue("parameters", ALL, "parameter-offload", stacks=True),
        ),
        **OFFLOAD,
        one_by_one=True,
        pays=lambda memory, ranks: memory.strategy != "ddp" or memory.cpu_offload != "parameters",  # needs FSDP
    ),
    Knob(
        "optimizer_in_backward",
        (None, True, False),
        "optimizer in backward",
        (KnobValue(True, ladder_name="optimizer-in-backward"),),
        **OF_UPDATE,
        noop_values=(False,),
        column="in backward",
        note="memory.optimizer_in_backward: the run ends at a step that is not finite, and it cannot recover from "
        "running out of memory: --memory.optimizer_in_backward false avoids both",
        null=False,
        splits=False,
        one_by_one=True,
        one_micro_batch=True,
        overlaps=True,
        pays=lambda memory, ranks: (
            not memory.sync_every_micro_step
            and memory.cpu_offload == "none"
            and (ranks == 1 or is_sharded(memory, ranks))
        ),
    ),
    Knob("optimizer_state_bits", (32, 8, 4), "{}-bit optimizer state", BITS, column="{}-bit", **LOSSY_STATE),
    Knob("stochastic_rounding", (False, True), "stochastic rounding", optimizers=ADAM, splits=False),
    Knob("precision", HALF_TRUE, candidates=IN_HALF, lossy=True, column="{}", evaluated=True),  # casts weights as well
    Knob("matmul_precision", TF32, "{} matmul precision", IN_TF32, lossy=True, column="{} matmuls", evaluated=True),
    Knob("init", ("device", "meta"), "{} init"),
    Knob("compile", ("none", "blocks", "model", "cuda_graphs"), "compiled {}", splits=False),
    Knob("expandable_segments", (None, True, False), "expandable segments", noop_values=(False,), evaluated=True),
)

LOSSLESS_PLANNED = tuple(sorted((k for k in KNOBS if k.planned and k.values), key=lambda knob: -knob.num_phases))
"""The lossless knobs that a search tries; those that lower the most phases come first."""

UNTESTED_WITH_TP = tuple(knob.name for knob in KNOBS if not knob.splits)
"""Knobs not yet verified with weights that ``tensor_parallel`` splits."""

EVALUATED = tuple(dict.fromkeys(knob.name for knob in KNOBS if knob.evaluated))
"""Knobs that an evaluation uses as training does."""

ONE_MICRO_BATCH = tuple(f"memory.{knob.name}" for knob in KNOBS if knob.one_micro_batch)

LOSSY = tuple(sorted((k for k in KNOBS if k.lossy), key=lambda knob: -knob.num_phases))

IMPLIED_NAMES = {f"memory.{name}" for knob in KNOBS for turn in knob.candidates for name in turn.implies}
"""Settings that a search changes only together with another one."""


def turned_off(name: str) -> dict[str, Any]:
    """Return the default values of the knob ``name`` and of those that have no effect without it."""
    return {knob.name: knob.values[0] for knob in KNOBS if name in (knob.name, knob.only_with)}


def undecided_knobs(memory: Memory) -> list[str]:
    """Return the knobs at ``auto`` that only the planner can decide."""
    names = [knob.name for knob in KNOBS if knob.planned and knob.values and knob.name != "strategy"]
    return [name for name in names if getattr(memory, name) == "auto"]


def describe_knobs(memory: Memory) -> list[str]:
    """Describe the knobs that differ from their defaults, in the order of the fields of ``memory``."""
    knobs = {knob.name: knob for knob in KNOBS if knob.description}
    mode = memory.activation_checkpointing
    shown = {"activation_checkpointing": mode if isinstance(mode, str) else f"{100 * mode:g} %"}
    return [
        knobs[name].description.format(shown.get(name, value))
        for name, value in vars(memory).items()
        if name in knobs and knobs[name].is_on(memory)
    ]
