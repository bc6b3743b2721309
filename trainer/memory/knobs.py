"""The one table of memory knobs: what each can be turned to, and what that is called and good for. Imports no torch.

The plan, the planner, the advice after an out of memory, the ladder and the tests read it. A new knob is a row here and
a field of ``recipe.Memory``; what it does is a file beside this one, called in ``stack.py``; what it cannot go with is
in ``refusals.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.recipe import Memory

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

    value: Any  # of the field of ``Memory``
    lowers: Phases = ()  # the phases whose peak it can lower; such a turn is advised when memory runs out there
    rung: str = ""  # of the ladder, that measures it
    stacked: bool = False  # whether the ladder also measures it on top of all stacked rungs before it
    unless: tuple[Any, ...] = ()  # values of the field at which it is no step forward
    needs_gpu: bool = False  # whether it makes sense on a GPU only
    along: Mapping[str, Any] = field(default_factory=dict)  # fields that a search sets with it, where not refused


@dataclass(frozen=True)
class Knob:
    """A field of ``Memory`` that decides a technique."""

    name: str  # of the field
    values: tuple[Any, ...] = ()  # the default first, then the fastest first; none where any number will do
    words: str = ""  # what a plan is called that has turned it; ``{}`` is its value
    turns: tuple[Turn, ...] = ()  # what to try by itself, the cheapest first
    planned: bool = False  # whether the planner decides it where it is left open
    graded: bool = True  # whether each of ``values`` computes or moves more than the one before: it can only be slower
    lossy: bool = False  # whether it changes the result: the planner turns it only when it is allowed to
    to_host: bool = False  # whether it moves memory to the host: nothing to gain where the host is the device
    needs_ranks: bool = False  # whether it does nothing on one rank
    optimizers: tuple[str, ...] = ()  # that it is for; none stands for all
    off: tuple[Any, ...] = ()  # values that change as little as the default
    column: str = ""  # its own in the planner's table; of a lossy one, what stands in the column of all those

    @property
    def reach(self) -> int:
        """How many phases it can lower."""
        return max((len(turn.lowers) for turn in self.turns), default=0)


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
TF32 = (Turn("high", needs_gpu=True), Turn("medium", needs_gpu=True))
IN_HALF = (
    Turn("bf16-true", ALL, "bf16-true", unless=("16-mixed", "16-true"), along={"stochastic_rounding": True}),
    Turn("16-true", ALL, unless=("32-true", "64-true", "bf16-mixed", "bf16-true")),
)
KNOBS = (  # in the order to try them
    Knob("micro_batch_size", planned=True),
    Knob("micro_batch_tokens"),
    Knob("precision", ("32-true", "64-true", "bf16-mixed", "16-mixed"), turns=MIXED),
    Knob(
        "activation_checkpointing",
        ("none", "selective", "full"),  # and any fraction of the blocks
        "{} checkpointing",
        CHECKPOINTING,
        planned=True,
        off=(0,),
        column="checkpointing",
    ),
    Knob("activation_offload", (False, True), "activations offloaded", ACTIVATIONS, planned=True, to_host=True),
    Knob("strategy", ("ddp", "fsdp"), turns=(Turn("fsdp", ALL),), planned=True, graded=False, needs_ranks=True),
    Knob("tensor_parallel", (1,), "tensor parallel over {} ranks", graded=False, needs_ranks=True),
    Knob("sequence_parallel", (False, True), "sequence parallel", graded=False, needs_ranks=True),
    Knob("replicas", (1, 2), "{} replicas", planned=True, graded=False, needs_ranks=True),
    # false is the faster one, and needs more memory
    Knob("reshard_after_forward", (True, False), "whole weights kept until backward", planned=True, graded=False),
    Knob(
        "sync_every_micro_step",
        (None, True, False),
        "sync every micro-step",
        planned=True,
        needs_ranks=True,
        off=(False,),
    ),
    Knob("cpu_offload", ("none", "optimizer", "parameters"), "{} offloaded", OFFLOAD, planned=True, to_host=True),
    Knob(
        "optimizer_in_backward",
        (None, True, False),
        "optimizer in backward",
        IN_BACKWARD,
        planned=True,
        off=(False,),
        column="in backward",
    ),
    Knob(
        "optimizer_state_bits", (32, 8, 4), "{}-bit optimizer state", BITS, lossy=True, optimizers=ADAM, column="{}-bit"
    ),
    Knob("stochastic_rounding", (False, True), "stochastic rounding", optimizers=ADAM),
    Knob("precision", HALF, turns=IN_HALF, lossy=True, column="{}"),  # of the weights themselves, too
    # Saves time, and no memory.
    Knob(
        "matmul_precision", ("highest", "high", "medium"), "{} matmul precision", TF32, lossy=True, column="{} matmuls"
    ),
    Knob("init", ("device", "meta"), "{} init"),
    Knob("compile", ("none", "blocks", "model", "cuda_graphs"), "compiled {}"),
)

SEARCHED = tuple(sorted((k for k in KNOBS if k.planned and k.values), key=lambda knob: -knob.reach))
"""The knobs that a search turns and that lose nothing; those that lower the most come first."""

UNPROVEN = (  # knobs not yet shown to be correct on weights that are split by ``tensor_parallel``
    *("cpu_offload", "activation_offload", "optimizer_in_backward", "optimizer_state_bits", "stochastic_rounding"),
    *("compile", "replicas"),
)

LOSSY = tuple(sorted((k for k in KNOBS if k.lossy), key=lambda knob: -knob.reach))

TOGETHER = {f"memory.{k.name}": tuple(f"memory.{name}" for name in t.along) for k in KNOBS for t in k.turns if t.along}
FOLLOWERS = {name for names in TOGETHER.values() for name in names}
"""Settings that are only there because of another one: by that one, and all of them."""


def left_open(memory: Memory) -> list[str]:
    """The knobs that are at ``auto`` and that nobody but the planner decides."""
    names = [knob.name for knob in KNOBS if knob.planned and knob.values and knob.name != "strategy"]
    return [name for name in names if getattr(memory, name) == "auto"]


def described(memory: Memory) -> list[str]:
    """The knobs that are turned, in words."""
    words = {knob.name: knob for knob in KNOBS if knob.words}
    kept = memory.activation_checkpointing
    shown = {"activation_checkpointing": kept if isinstance(kept, str) else f"{100 * kept:g} %"}
    return [
        words[name].words.format(shown.get(name, value))
        for name, value in vars(memory).items()
        if name in words and value not in (words[name].values[0], *words[name].off)
    ]
