"""``fake_gpu``: what any training loop would take of a GPU that is not there, found by hooks and not by our engine."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from trainer.errors import RunError, require
from trainer.planner.allocator import AllocatorSettings
from trainer.planner.events import Category, Event
from trainer.planner.fake_mode import FakeGPUMode
from trainer.planner.fake_patches import _replace, patch_transformers
from trainer.planner.gpus import GPU, gpu_named, usable_memory
from trainer.planner.network import ONE, Cluster, interconnects
from trainer.planner.predict import LARGEST, _timeline, cost_of
from trainer.planner.replay import PhasePeak, Replay, replay
from trainer.planner.target import Target
from trainer.planner.tracer import Tracer, plain_tensors, tracing
from trainer.system.text import GB, gigabytes

aten = torch.ops.aten


class Held(NamedTuple):
    """A block of memory at the peak."""

    bytes: int  # that were asked for
    category: Category
    name: str  # of the parameter, or the operation that made it and the module that this was in
    shape: tuple[int, ...]  # of the tensor that it was made for
    dtype: str  # as torch names it (``bfloat16``)
    phase: str  # in which it was made


class LoopTracer(Tracer):
    """A tracer that guesses phases and categories from calls that any loop makes.

    Phases: ``forward`` begins with the outermost call of a module (``evaluation``, without gradients) and lasts until
    something else does; ``backward`` and ``step`` are ``Tensor.backward`` and ``Optimizer.step``; what is between them
    is ``other``, and what is before them all ``init``.
    """

    def __init__(self, target: Target, mode: FakeGPUMode) -> None:
        super().__init__(target, mode)
        self.records_work = True
        self.made: dict[int, tuple[tuple[int, ...], str]] = {}  # by block: shape and dtype
        self.names: dict[int, str] = {}  # by block
        self.steps, self.step_work = 0, (0, 0)  # optimizer steps taken, and the work of the last one
        self._from_host: set[int] = set()  # blocks that the loop has copied to the device
        self._parameters = WeakIdKeyDictionary()  # {parameter: name}
        self._modules: list[nn.Module] = []  # that are being called, the innermost last
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._backwards = self._steps = 0  # how many are going on, one within the other
        self._began: dict[int, int] = {}  # by optimizer: where in the work its next step begins
        self._first_work = 0

    def __enter__(self) -> Tracer:
        call, backward, apply = nn.Module.__call__, torch.autograd.backward, nn.Module._apply

        def called(module: nn.Module, *args: Any, **options: Any) -> Any:
            if not self._modules:
                self._begin_forward(module, (args, options))
            self._modules.append(module)
            try:
                return call(module, *args, **options)
            finally:
                self._modules.pop()

        def backwards(*args: Any, **options: Any) -> None:
            self.enter("backward")
            self._backwards += 1
            try:
                backward(*args, **options)
            finally:
                self._backwards -= 1
                self._after()

        def applied(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
            apply(module, change, recurse)
            self._name_parameters(module)
            return module

        _replace(nn.Module, __call__=called, _apply=applied)
        _replace(torch.autograd, backward=backwards)
        self._hooks = [
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._settle_batch()
        for hook in self._hooks:
            hook.remove()

    def enter(self, phase: str) -> None:
        if phase == "backward":
            self._settle_batch()
        super().enter(phase)

    def watch(self, tensor: Any, op: str) -> None:
        before = self._ids
        super().watch(tensor, op)
        if self._ids > before:
            self.made[self._ids] = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            path = self._paths.get(self._modules[-1]) if self._modules else None
            self.names[self._ids] = f"{op} in {path}" if path else op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._ids
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._ids > before and func is aten._to_copy.default and not self.is_on_device(args[0]):
            self._from_host.add(self._ids)
        return out

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        self._name_parameters(module)
        if self._backwards:  # computed again
            return
        self.categorise([leaf for leaf in tree_leaves(inputs) if _is_data(leaf)], "batch")
        if self.phase == "init":
            self._first_work = len(self.trace.work)
        self.enter("forward" if torch.is_grad_enabled() else "evaluation")

    def _begin_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        for number, parameter in enumerate(_parameters(optimizer)):
            self._parameters.setdefault(parameter, f"parameter {number}")
            self._claim(parameter, "params", self._parameters[parameter])
        self._claim_gradients()
        self._steps += 1
        self.enter("step")

    def _end_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                for tensor in tree_leaves(value):
                    self._claim(tensor, "optimizer", f"{key} of {self._parameters.get(parameter, 'a parameter')}")
        end = len(self.trace.work)
        self.step_work = self._began.get(id(optimizer), self._first_work), end
        self._began[id(optimizer)] = end  # several take turns: each has what was done since its own last step
        self.steps += 1
        self._steps -= 1
        self._after()

    def _after(self) -> None:
        """A backward or a step has ended, perhaps within another one."""
        if not self._backwards:
            self._claim_gradients()
        self.enter("backward" if self._backwards else "step" if self._steps else "other")

    def _name_parameters(self, module: nn.Module) -> None:
        """By their whole paths: of what is a part of several, the longest."""
        for path, part in module.named_modules():
            self._paths[part] = max(path, self._paths.get(part, ""), key=len)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            path = max(name, self._parameters.get(tensor, ""), key=len)
            if isinstance(tensor, nn.Parameter):
                self._parameters[tensor] = path
            self._claim(tensor, "params", path)

    def _claim_gradients(self) -> None:
        for parameter, name in self._parameters.items():
            if parameter.grad is not None:
                self._claim(parameter.grad, "gradients", f"gradient of {name}")

    def _claim(self, tensor: Any, category: Category, name: str) -> None:
        """Say what the memory of ``tensor`` is for, whatever was guessed before."""
        for part in plain_tensors(tensor):
            storage = self.storages.get(id(part.untyped_storage()))
            if storage is not None and storage.on_device and storage.bytes:
                self.trace.categories[storage.id], self.names[storage.id] = category, name

    def _settle_batch(self) -> None:
        """What was copied from the host, and is nothing else, is the batch."""
        for number in self._from_host:
            self.trace.categories.setdefault(number, "batch")
        self._from_host.clear()


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class FakeGPU:
    """What a loop has taken of a card that is not there, so far or, after the block, in all. Memory is in bytes.

    Attributes:
        card: the GPU.
        capacity: bytes that torch may take of it: all but CUDA's context.
    """

    def __init__(self, target: Target, tracer: LoopTracer) -> None:
        self.card, self.capacity = target.gpu, usable_memory(target.gpu, 1)
        self._target, self._tracer, self._trace = target, tracer, tracer.trace
        self._replayed: tuple[int, Replay] | None = None

    @property
    def _replay(self) -> Replay:
        count = len(self._trace.events)
        if self._replayed is None or self._replayed[0] != count:
            self._replayed = count, replay(self._trace, AllocatorSettings(self._target.expandable_segments))
        return self._replayed[1]

    @property
    def allocated(self) -> int:
        """The most that tensors took at once, as ``torch.cuda.max_memory_allocated``."""
        return self._replay.peak_allocated

    @property
    def reserved(self) -> int:
        """The most that torch's allocator took from the GPU, as ``torch.cuda.max_memory_reserved``."""
        return self._replay.peak_reserved

    @property
    def host(self) -> int:
        """The most that tensors made in the block took in host memory, besides Python and its libraries."""
        return self._trace.host_bytes

    @property
    def fits(self) -> bool:
        """Whether the loop would have run on the card; it is never ended by a want of memory."""
        return self.reserved <= self.capacity

    @property
    def categories(self) -> dict[Category, int]:
        """What is in use at the allocated peak, by what it is for, the largest first."""
        return self._replay.categories

    @property
    def phases(self) -> dict[str, PhasePeak]:
        """The peaks within each phase: init, forward, backward, step, evaluation and, between them, other."""
        return self._replay.phases

    @property
    def peak_phase(self) -> str:
        """Where the allocated peak is."""
        return self._replay.allocated_phase or "init"

    @property
    def largest(self) -> list[Held]:
        """The largest blocks at the allocated peak, the largest first."""
        at, alive = self._replay.allocated_at, dict[int, Event]()
        for event in self._trace.events[: 0 if at is None else at + 1]:
            if event.bytes:
                alive[event.id] = event
            else:
                alive.pop(event.id)
        return [self._held(event) for event in sorted(alive.values(), key=lambda one: -one.bytes)[:LARGEST]]

    def _held(self, event: Event) -> Held:
        category: Category = self._trace.categories.get(event.id, "temporaries")
        shape, dtype = self._tracer.made.get(event.id, ((), ""))
        return Held(event.bytes, category, self._tracer.names.get(event.id, event.op), shape, dtype, event.phase)

    @property
    def steps(self) -> int:
        """Optimizer steps that were taken."""
        return self._tracer.steps

    @property
    def step_ms(self) -> float:
        """Milliseconds of the last optimizer step, estimated, with all that was done on the GPU since the one before.

        Raises:
            RunError: when no optimizer step was taken.
        """
        if not self.steps:
            raise RunError("no optimizer step was taken, so none has a time: take two or more inside of the block")
        begin, end = self._tracer.step_work
        trace = dataclasses.replace(self._trace, work=self._trace.work[begin:end])
        return cost_of(trace, self._target, Cluster(1, 1), interconnects(ONE, self.card)[0]).step_ms

    @property
    def notes(self) -> list[str]:
        """What else a person must know to read the figures."""
        notes = list(self._trace.notes)
        if guesses := self._tracer.mode.guesses:
            notes.append(f"{guesses} branches depend on values that were guessed")
        if self.steps < 2:
            taken = "one optimizer step was" if self.steps else "no optimizer step was"
            notes.append(f"{taken} taken: gradients and the state of the optimizer may be missing in the peak")
        return notes

    def plot(self, path: str | Path) -> None:
        """Draw memory over allocations and frees, by what it is for, with the phases: a PNG."""
        from trainer.report.plots import plot_plan

        title = f"{self.card.title}, predicted" + ("" if self.fits else ": does not fit")
        plot_plan(_timeline(self._replay, self._trace), self.capacity, title, Path(path))

    def to_json(self) -> dict[str, Any]:
        """All of it in plain types, memory in GB (1e9 bytes)."""

        def gb(size: int) -> float:
            return round(size / GB, 4)

        return {
            "card": self.card.name,
            "fits": self.fits,
            **{f"{name}_gb": gb(getattr(self, name)) for name in ("capacity", "allocated", "reserved", "host")},
            "steps": self.steps,
            "step_ms": round(self.step_ms, 2) if self.steps else None,
            "peak_phase": self.peak_phase,
            "phases": {
                phase: {f"{kind}_gb": gb(size) for kind, size in peaks._asdict().items()}
                for phase, peaks in self.phases.items()
            },
            "categories": {name: gb(size) for name, size in self.categories.items()},
            "largest": [{"gb": gb(size), **held} for size, held in map(_without_bytes, self.largest)],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        step = f"{self.step_ms:,.1f} ms (estimated)" if self.steps else "none was taken"
        rows = [
            ("card", f"{self.card.title}: {gigabytes(self.capacity)} for torch; it {verdict}"),
            ("reserved", f"{gigabytes(self.reserved)} at most, {gigabytes(self.allocated)} of it by tensors"),
            ("peak", f"in {self.peak_phase}: {', '.join(f'{k} {gigabytes(v)}' for k, v in self.categories.items())}"),
            ("host", f"{gigabytes(self.host)} at most"),
            ("step", step),
            *(("note", note) for note in self.notes),
        ]
        return "\n".join(f"{label:<9} {text}" for label, text in rows)


def _without_bytes(held: Held) -> tuple[int, dict[str, Any]]:
    size, *_ = held
    return size, {key: value for key, value in held._asdict().items() if key != "bytes"}


@contextmanager
def fake_gpu(card: str | GPU, *, torch_version: str | tuple[int, int] | None = None) -> Iterator[FakeGPU]:
    """Give the block a CUDA device that is not there, and find out what it would take of a real one.

    Whatever is made in the block is without data; real tensors and modules (on the CPU or on meta) become so when they
    are moved with ``.to("cuda")``, and stay so. Nothing is compiled; floating-point numbers that are read are 1.0.

    Args:
        card: such as ``"a100-80gb"``.
        torch_version: whose kernels the card would run, such as ``"2.6"``; by default that of this process.

    Raises:
        RecipeError: for a card or a version that is not known.
        RunError: within another such block, or when this process has used its GPU already.
    """
    gpu = gpu_named(card) if isinstance(card, str) else card
    if torch.cuda.is_initialized():
        raise RunError("this process has used its GPU already: call fake_gpu before that, or in a process of its own")
    target = dataclasses.replace(Target.here(gpu), torch_version=_version(torch_version))
    with tracing(target, kind=LoopTracer) as tracer:
        patch_transformers()
        tracer.enter("init")
        assert isinstance(tracer, LoopTracer)
        yield FakeGPU(target, tracer)


def _version(wanted: str | tuple[int, int] | None) -> tuple[int, int]:
    if wanted is None or isinstance(wanted, tuple):
        return wanted or (0, 0)
    match = re.match(r"(\d+)\.(\d+)", wanted)
    require(match is not None, f"torch_version={wanted!r} must be such as '2.6'")
    assert match is not None
    return int(match[1]), int(match[2])
