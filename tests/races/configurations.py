"""Runs that are watched: their memory techniques on few and small layers, but of sizes for which these techniques work.

On fake tensors a size costs nothing, so all limits of the techniques (chunks, buckets, the smallest tensor that is
moved) are what they are in a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import accelerate  # noqa: F401 - by Lightning, at the latest in each child
import torch
import torchvision.models.vision_transformer  # noqa: F401
from races.detector import Detector
from races.watched import WatchedTracer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from trainer.contract import Data
from trainer.fakegpu import tracer
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.memory import optimizer_offload
from trainer.memory.activation_offload import ActivationOffloader
from trainer.memory.plan import decide_plan
from trainer.models import MLP, VisionTransformer
from trainer.planner import traced_run
from trainer.planner.predict import prepare_recipe
from trainer.recipe import Memory, Optim, Recipe, Run
from trainer.system.child_jobs import run_in_child

Plant = Callable[[], list[Any]]
"""Changes our code, and returns a list that grows whenever what was changed is met."""

TARGET = Target(gpu_named("h200"))
CLASSES = 5
LAYERS = MLP([1024] * 3, image_size=16, channels=4, num_classes=CLASSES)
BLOCKS = VisionTransformer(
    "custom", num_classes=CLASSES, image_size=64, patch_size=4, layers=2, heads=2, width=1024, mlp_width=1024
)
MICRO_BATCHES = {"layers": 512, "blocks": 2}
"""Samples, so that activations take 1 MiB in half precision."""


@dataclass
class Blank(Data):
    """Samples that are all the same."""

    count: int = 0
    shape: tuple[int, ...] = ()

    def prepare(self, tokenizer: Any = None) -> None:
        self.train = [{"pixel_values": torch.zeros(self.shape), "labels": torch.tensor(0)}] * self.count
        self.val = self.train[:1]

    def collate(self, samples: Sequence[Any]) -> Any:
        return default_collate(list(samples))


@dataclass(frozen=True)
class Configuration:
    """What is run: two optimizer steps of two micro-steps each on every rank."""

    memory: dict[str, Any] = field(default_factory=dict)  # knobs that differ from bf16-mixed
    optim: dict[str, Any] = field(default_factory=dict)  # settings that differ from AdamW's
    ranks: int = 1
    model: str = "blocks"  # of a Vision Transformer; linear "layers"; or one of the planner's tiny models
    run: dict[str, Any] = field(default_factory=dict)  # settings that differ from a run without an evaluation
    around: Callable[[], None] = lambda: None  # called in the process of the run before it begins
    program: Callable[[], None] | None = None  # what is watched instead of a run

    @property
    def recipe(self) -> Recipe:
        """Prepared."""
        micro = MICRO_BATCHES.get(self.model, 2)
        memory = Memory(**{"precision": "bf16-mixed", "micro_batch_size": micro, **self.memory})
        batch_size = micro * self.ranks * (1 if memory.optimizer_in_backward else 2)
        optim, run = Optim(**{"name": "adamw", **self.optim}), Run(**{"evaluate": False, **self.run})
        settings: dict[str, Any] = {"optim": optim, "memory": memory, "batch_size": batch_size, "run": run}
        if self.model not in MICRO_BATCHES:
            from helpers.tiny import recipe_of  # takes long, and only few need it

            return recipe_of(self.model, **settings)
        model, shape = (LAYERS, (4, 16, 16)) if self.model == "layers" else (BLOCKS, (3, 64, 64))
        return prepare_recipe(Recipe(model=model, data=Blank(count=batch_size, shape=shape), **settings))


def out_of_memory_once() -> None:
    """The last backward of the second step runs out of memory, and the step is taken again from its beginning."""

    class Recovering(traced_run._FakeStepper):
        hungry = True

        def launch(self, window: Any, *then: Any) -> None:
            try:
                super().launch(window, *then)
            except torch.OutOfMemoryError:
                self.abandon()
                super().launch(window, *then)

        def losses(self, batch: Any, packed: Any = None) -> Any:
            for loss in super().losses(batch, packed):
                yield loss
                if self.hungry and self.tracer.detector.entered["forward"] == 4:  # type: ignore[attr-defined]
                    type(self).hungry = False
                    raise torch.OutOfMemoryError("planted")

    traced_run._FakeStepper = Recovering  # type: ignore[misc]


def fetched_in_vain() -> None:
    """Backward ends early: what was fetched ahead is freed, and its memory is asked for again."""
    shelf = ActivationOffloader(torch.device("cuda", 0), 16, lambda tensor: False)
    tickets = [shelf.pack(torch.ones(64, device="cuda") * number) for number in range(4)]
    shelf.unpack(tickets.pop())
    tickets.clear()
    del shelf
    torch.ones(64, device="cuda").add_(1)


def one_gradient_again_and_again() -> None:
    """Nothing else is carried in between."""
    carrier = optimizer_offload.TransferStream(torch.device("cuda", 0), torch.float32)
    home = torch.zeros(64, pin_memory=True)
    for adds in (False, True, True):
        carrier.gradient_to_host(torch.ones(64, device="cuda"), home, adds)
    carrier.wait()
    home.sum()


OPTIMIZER = {"cpu_offload": "optimizer"}
PARAMETERS = {"cpu_offload": "parameters"}
ACTIVATIONS = {"activation_offload": True}
FULL = {"activation_checkpointing": "full"}
SHARDED = {"strategy": "fsdp"}
REPLICATED = {"strategy": "fsdp", "replicas": 2}
FP16 = {"precision": "16-mixed"}
IN_BACKWARD = {"optimizer_in_backward": True}
DETERMINISTIC = {"deterministic": True}

USUAL = {
    "one gradient again and again": Configuration(program=one_gradient_again_and_again),
    "activations fetched in vain": Configuration(program=fetched_in_vain),
    "optimizer, fp16, clipped": Configuration(OPTIMIZER | FP16, {"clip_norm": 1.0}, model="layers"),
    "optimizer, out of memory once": Configuration(OPTIMIZER, model="layers", around=out_of_memory_once),
    "activations": Configuration(ACTIVATIONS, model="layers"),
    "activations, optimizer, full": Configuration(ACTIVATIONS | OPTIMIZER | FULL),
    "parameters, 4 ranks": Configuration(PARAMETERS, ranks=4),
    "optimizer, hsdp of 2 x 2": Configuration(OPTIMIZER | REPLICATED, ranks=4),
    "in backward, hsdp of 2 x 2": Configuration(IN_BACKWARD | REPLICATED, ranks=4),
    "fp16": Configuration(FP16, model="layers"),
    "ddp of 2": Configuration(ranks=2),
    "fsdp of 4": Configuration(SHARDED, ranks=4),
    "deterministic, 4 ranks": Configuration(ranks=4, model="layers", run=DETERMINISTIC),
    "packed language model, chunked loss": Configuration(model="llama"),
}
"""Those of every run of the tests."""

OTHERS = {
    "plain": Configuration(run={"evaluate": True}),
    "optimizer": Configuration(OPTIMIZER),
    "optimizer, 2 ranks": Configuration(OPTIMIZER, ranks=2),
    "optimizer, fsdp of 4, fp16": Configuration(OPTIMIZER | SHARDED | FP16, ranks=4),
    "optimizer, fsdp of 4, synced": Configuration(OPTIMIZER | SHARDED | {"sync_every_micro_step": True}, ranks=4),
    "optimizer, bf16": Configuration(OPTIMIZER | {"precision": "bf16-true"}),
    "activations, selective": Configuration(ACTIVATIONS | {"activation_checkpointing": "selective"}),
    "activations, fsdp of 2": Configuration(ACTIVATIONS | SHARDED, ranks=2),
    "activations, optimizer": Configuration(ACTIVATIONS | OPTIMIZER),
    "activations, out of memory once": Configuration(ACTIVATIONS, around=out_of_memory_once),
    "parameters, full": Configuration(PARAMETERS | FULL),
    "parameters, hsdp of 2 x 2": Configuration(PARAMETERS | {"replicas": 2}, ranks=4),
    "parameters, bf16-true": Configuration(PARAMETERS | {"precision": "bf16-true"}, ranks=4),
    "parameters, fp16": Configuration(PARAMETERS | FULL | FP16),
    "parameters, activations": Configuration(PARAMETERS | FULL | ACTIVATIONS),
    "parameters, out of memory once": Configuration(PARAMETERS, around=out_of_memory_once),
    "in backward, fsdp of 4": Configuration(IN_BACKWARD | SHARDED, ranks=4),
    "fsdp of 4, synced": Configuration(SHARDED | {"sync_every_micro_step": True}, ranks=4),
    "fsdp of 4, whole weights kept": Configuration(SHARDED | {"reshard_after_forward": False}, ranks=4),
    "fsdp of 4, fp16": Configuration(SHARDED | FP16, ranks=4),
    "fsdp of 4, meta": Configuration(SHARDED | {"init": "meta"}, ranks=4, model="tower"),
    "deterministic, fsdp of 4": Configuration(SHARDED, ranks=4, run=DETERMINISTIC),
    "deterministic, parameters": Configuration(PARAMETERS, ranks=4, run=DETERMINISTIC),
    "batches tried first": Configuration(OPTIMIZER | {"micro_batch_size": "auto"}),
    "8-bit state, fsdp of 4": Configuration(SHARDED | {"optimizer_state_bits": 8}, ranks=4),
    "stochastic rounding": Configuration({"stochastic_rounding": True, "precision": "bf16-true"}),
    "compiled": Configuration({"compile": "blocks"}),
    "lora, optimizer": Configuration(OPTIMIZER, model="lora"),
    "text, optimizer": Configuration(OPTIMIZER, model="distilbert"),
    "bigbird": Configuration(model="bigbird"),
    "batch norm, ddp of 2": Configuration({"correct_batchnorm": True}, model="batchnorm", ranks=2),
    "two losses, ddp of 2": Configuration(model="two_losses", ranks=2),
    "packed texts": Configuration(model="distilbert"),
    "language model, tied rows, updated ahead": Configuration(OPTIMIZER, model="gemma"),
    "language model, parameters": Configuration(PARAMETERS, model="llama"),
    "nf4": Configuration(model="nf4"),
    "nf4, optimizer": Configuration(OPTIMIZER, model="nf4"),
    "tensor parallel": Configuration({"tensor_parallel": 2}, ranks=2),
    "sequence parallel": Configuration({"tensor_parallel": 2, "sequence_parallel": True}, ranks=2),
    "averages": Configuration(optim={"ema": 0.9}),
}

CONFIGURATIONS = USUAL | OTHERS


@dataclass(frozen=True)
class Watched:
    """What was seen in a run."""

    findings: dict[str, int]  # what is wrong, and how often
    syncs: list[list[Any]]  # where the host waited: [phase, what, file, function, line, times]
    entered: dict[str, int]  # how often each phase began; a window, and how many were abandoned
    orders: list[list[str]]  # [kind, place] of every order between streams, or with the host, that our own code gave
    operations: int  # how many were launched
    met: int  # how often the planted fault was met


def watch(name: str, plant: Plant | None = None, forgotten: tuple[str, str] | None = None) -> Watched:
    """Run a configuration in a process of its own, perhaps with a fault: one of ``faults``, or a forgotten order."""
    return Watched(**run_in_child(partial(_watch, CONFIGURATIONS[name], plant, forgotten)))


def _watch(configuration: Configuration, plant: Plant | None, forgotten: tuple[str, str] | None) -> dict[str, Any]:
    detector = install(Detector(forgotten))
    met = plant() if plant else []
    configuration.around()
    if configuration.program is not None:
        with traced_run.tracing(TARGET):
            configuration.program()
    else:
        recipe = configuration.recipe
        plan = decide_plan(recipe, configuration.ranks)
        samples = traced_run.draw_samples(recipe, plan)
        loaded = [*samples.first, *samples.longest, *samples.evaluation]
        PINNED.extend(tree_leaves([micro.batch if micro.packed is None else micro.packed for micro in loaded]))
        traced_run.trace_run(recipe, plan, samples, TARGET)
    return {
        "findings": detector.findings,
        "syncs": [[phase, what, *place, times] for (phase, what, place), times in detector.syncs.items()],
        "entered": detector.entered,
        "orders": list(detector.orders),
        "operations": detector.operations,
        "met": len(met),
    }


def install(detector: Detector) -> Detector:
    """Let ``detector`` watch what is traced in this process, with all its transfers: the planner counts some once."""
    WatchedTracer.detector = detector
    tracer.Tracer = WatchedTracer  # type: ignore[misc]
    whole = optimizer_offload.in_chunks
    traced_run._Run._first_chunk = lambda run, *cut: whole(*cut)  # type: ignore[method-assign, assignment]

    class Counting(traced_run._FakeStepper):
        to_device = _to_device

        def accumulate(self, window: Any) -> Any:
            detector.entered["window"] += 1
            return super().accumulate(window)

        def abandon(self) -> None:
            detector.entered["abandoned"] += 1
            super().abandon()

    traced_run._FakeStepper = Counting  # type: ignore[misc]
    return detector


PINNED: list[Any] = []
"""What the loader has given, which pins it."""


def _to_device(stepper: Any, batch: Any) -> Any:
    """As a real run does it: what the loader has given is pinned, and nothing that was made of it afterwards."""

    def pinned(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        fake = stepper.tracer.mode.fake(item)
        if any(item is one for one in PINNED):
            stepper.tracer.mode.pinned.add(fake.untyped_storage())
        return fake

    return stepper.fabric.to_device(tree_map(pinned, batch))
