"""``fake_gpu``: predict memory and time of any training loop on a simulated GPU, with hooks instead of our engine."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from trainer.errors import RecipeError, RunError, require
from trainer.fakegpu import peaks
from trainer.fakegpu.allocator import AllocatorSettings, Block, CachingAllocator
from trainer.fakegpu.compiled import COMPILED, MODULE_COMPILE, CompilerOnFakeTensors
from trainer.fakegpu.cost import cost_of, traffic_of
from trainer.fakegpu.events import EMPTY_CACHE, Category, Event
from trainer.fakegpu.expected_error import expected_error, kind_of_loop
from trainer.fakegpu.fake_process_group import TracedDDP, simulate_ranks
from trainer.fakegpu.gpus import GPU, gpu_named, usable_memory
from trainer.fakegpu.mode import FakeGPUMode
from trainer.fakegpu.network import DEFAULT_NETWORK, Cluster, check_cluster, interconnects
from trainer.fakegpu.snapshot import snapshot
from trainer.fakegpu.target import Target
from trainer.fakegpu.torch_patches import _undo_stack, patch, patch_libraries
from trainer.fakegpu.tracer import Tracer, constituent_tensors, tracing
from trainer.system.text import format_bytes, wrapped

ALONE = Cluster(1, 1)
draw: Callable[[dict[str, Any], int, str, Path], None] | None = None
"""The function that :meth:`FakeGPU.plot` calls with :attr:`FakeGPU.picture`. ``trainer.planner`` registers it."""


class MemoryBlock(NamedTuple):
    """A block of memory."""

    bytes: int  # requested bytes
    category: Category
    name: str  # parameter, or operation and module that created the block
    shape: tuple[int, ...]  # shape of the tensor that the block was created for
    dtype: str  # dtype of that tensor, as torch names it (``bfloat16``)
    phase: str  # phase in which the block was created


class UserLoopTracer(Tracer):
    """A tracer that infers phases and categories from calls that every training loop makes.

    ``forward`` starts with the outermost call of a module (``evaluation`` if gradients are disabled) and ends when
    another phase starts. ``backward`` and ``step`` are calls of backward and of an optimizer; ``other`` follows them.
    """

    def __init__(self, target: Target, mode: FakeGPUMode) -> None:
        super().__init__(target, mode)
        self.records_work, self.settings = True, AllocatorSettings(target.expandable_segments)
        self.made: dict[int, MemoryBlock] = {}  # by block number
        self.steps, self.step_work = 0, (0, 0)  # number of optimizer steps, and the last one's range in trace.work
        self._from_host: set[int] = set()  # blocks copied from the host that have no category yet
        self._names = WeakIdKeyDictionary()  # full names of modules and parameters
        self._calls: list[nn.Module] = []  # active module calls, the innermost last
        self._backwards = self._updates = 0  # number of active, possibly nested, calls
        self._began: dict[int | None, int] = {None: 0}  # start of the next step in trace.work, by id of the optimizer
        self._meter, self._blocks, self._metered = CachingAllocator(self.settings), dict[int, Block](), 0

    def __enter__(self) -> Tracer:
        call, backward, apply = nn.Module.__call__, torch.autograd.backward, nn.Module._apply
        compiles = CompilerOnFakeTensors(self)

        def called(module: nn.Module, *args: Any, **options: Any) -> Any:
            if not self._calls and not self._backwards:  # a call during backward is recomputation
                self._name(module)
                inputs = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
                self.categorise([tensor for tensor in inputs if not self._is_computed(tensor)], "batch")
                if self.phase == "init":
                    patch_libraries(self.launch)
                    self._began[None] = len(self.trace.work)
                self.enter("forward" if torch.is_grad_enabled() else "evaluation")
            self._calls.append(module)
            try:
                return call(module, *args, **options)
            finally:
                self._calls.pop()

        def backwards(*args: Any, **options: Any) -> None:
            self.enter("backward")
            self._backwards += 1
            try:
                backward(*args, **options)
            finally:
                self._backwards -= 1
                self._after()

        def applied(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
            self._fake_parameters(module)
            apply(module, change, recurse)
            self._name(module)
            return module

        patch(torch.autograd, backward=backwards)
        patch(nn.Module, __call__=called, _apply=applied, compile=MODULE_COMPILE)
        patch(torch, compile=compiles)
        for module in (torch.cuda, torch.cuda.memory):
            patch(module, memory_stats=self._stats, mem_get_info=self._free, empty_cache=self._empty_cache)
            patch(module, reset_peak_memory_stats=self._reset_peaks)
        _undo_stack.callback(register_optimizer_step_pre_hook(self._begin_step).remove)
        _undo_stack.callback(register_optimizer_step_post_hook(self._end_step).remove)
        return super().__enter__()

    def enter(self, phase: str) -> None:
        if phase == "backward":
            self.mark_batches()
        super().enter(phase)

    def mark_batches(self) -> None:
        """Categorise tensors that were copied from the host as the batch, unless they have another category."""
        for number in self._from_host:
            self.trace.categories.setdefault(number, "batch")
        self._from_host.clear()

    def describe_blocks(self, blocks: list[Event]) -> list[MemoryBlock]:
        """Return descriptions of the blocks, the largest first."""
        found = []
        for number, size, op, phase, _ in blocks:
            known = self.made.get(number) or MemoryBlock(size, "temporaries", op, (), "", phase)
            found.append(known._replace(category=self.trace.categories.get(number, "temporaries")))
        return sorted(found, key=lambda block: -block.bytes)

    def watch(self, tensor: Any, op: str) -> None:
        before = self._ids
        super().watch(tensor, op)
        if self._ids > before and tensor.layout is not torch.sparse_coo:  # parts of a sparse tensor are watched
            path = self._names.get(self._calls[-1]) if self._calls else None
            what = f"{op} in {path}" if path else op, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            self.made[self._ids] = MemoryBlock(tensor.untyped_storage().nbytes(), "temporaries", *what, self.phase)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._ids
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._ids > before and func is torch.ops.aten._to_copy.default and not self.is_on_device(args[0]):
            self._from_host.add(self._ids)
        return out

    def kind(self) -> str:
        """Return the kind of this loop; see :mod:`trainer.fakegpu.expected_error`."""
        weights = self.weights()
        trained = sum(one.numel() for one in weights if one.requires_grad)
        share = trained / max(1, sum(one.numel() for one in weights))
        is_sharded = any(isinstance(one, DTensor) for one in weights)
        return kind_of_loop(COMPILED in self.trace.notes, is_sharded, share, self.target.version)

    def weights(self) -> list[nn.Parameter]:
        return [part for part in self._names if isinstance(part, nn.Parameter)]

    def _begin_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            self._set_category(parameter, "params", self._names.setdefault(parameter, f"parameter {number}"))
        self._claim_gradients()
        self._updates += 1
        self.enter("step")

    def _end_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                for tensor in tree_leaves(value):
                    self._set_category(tensor, "optimizer", f"{key} of {self._names.get(parameter)}")
        end = len(self.trace.work)  # with several optimizers, a step covers the work since the same optimizer's last
        self.step_work = self._began.get(id(optimizer), self._began[None]), end
        self._began[id(optimizer)] = end
        self.steps += 1
        self._updates -= 1
        self._after()

    def _after(self) -> None:
        self._claim_gradients()
        self.enter("backward" if self._backwards else "step" if self._updates else "other")

    def _name(self, module: nn.Module) -> None:
        """Name the parts of ``module``; shared parts get the longest path."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        for path, part in (*module.named_modules(), *tensors.items()):
            name = path.replace("_orig_mod.", "")  # torch.compile's wrapper
            self._names[part] = max(name, self._names.get(part, ""), key=len)
        for tensor in tensors.values():
            self._set_category(tensor, "params", self._names[tensor])

    def _is_computed(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a model's output, such as the input of a loss module, rather than a batch."""
        found = (self.storages.get(id(part.untyped_storage())) for part in constituent_tensors(tensor))
        return tensor.requires_grad or any(one and one.phase in ("forward", "evaluation") for one in found)

    def _claim_gradients(self) -> None:
        for part, name in self._names.items():
            if isinstance(part, nn.Parameter) and part.grad is not None:
                self._set_category(part.grad, "gradients", f"gradient of {name}")
            for bucket in part.buckets if isinstance(part, TracedDDP) else ():
                self._set_category(bucket, "gradients", "bucket of DDP")

    def _set_category(self, tensor: Any, category: Category, name: str) -> None:
        """Set category and name of the memory of ``tensor``, replacing an earlier guess."""
        for part in constituent_tensors(tensor):
            storage = self.storages.get(id(part.untyped_storage()))
            if storage is not None and storage.on_device and storage.bytes:
                self.trace.categories[storage.id] = category
                if storage.id in self.made:
                    self.made[storage.id] = self.made[storage.id]._replace(name=name)

    def _fake_parameters(self, module: nn.Module) -> None:
        """Replace a module's real parameters by fake ones, also in optimizers; shared parameters stay shared."""
        found: dict[int, Any] = {}
        for part in module.modules():
            for name, real in part._parameters.items():
                if real is not None and not isinstance(real, FakeTensor):
                    if id(real) not in found:
                        found[id(real)] = self._faked(real)
                    part._parameters[name] = found[id(real)]
        for optimizer in [one for one in gc.get_objects() if issubclass(type(one), Optimizer)] if found else ():
            for group in optimizer.param_groups:
                group["params"] = [found.get(id(parameter), parameter) for parameter in group["params"]]

    def _faked(self, real: nn.Parameter) -> Any:
        if not real.is_meta:
            return self.mode.from_tensor(real)
        with _disable_current_modes(), self.mode:  # not counted as host memory
            return nn.Parameter(torch.empty_like(real, device="cpu"), real.requires_grad)

    # torch.cuda's memory functions, answered by a simulated allocator that follows the trace.

    def _empty_cache(self) -> None:
        self.trace.events.append(Event(EMPTY_CACHE, 0, "empty_cache", self.phase))

    def _stats(self, device: Any = None) -> dict[str, int]:
        meter, events = self._meter, self.trace.events
        for event in events[self._metered :]:
            peaks.apply_event(meter, self._blocks, event)
        self._metered = len(events)
        allocated, reserved = (meter.allocated, meter.peak_allocated), (meter.reserved, meter.peak_reserved)
        found: dict[str, int] = defaultdict(int, num_ooms=0, num_alloc_retries=0)
        for kind, values in {"allocated": allocated, "active": allocated, "reserved": reserved}.items():
            found[f"{kind}_bytes.all.current"], found[f"{kind}_bytes.all.peak"] = values
        return found

    def _reset_peaks(self, device: Any = None) -> None:
        self._stats()
        self._meter.peak_allocated, self._meter.peak_reserved = self._meter.allocated, self._meter.reserved

    def _free(self, device: Any = None) -> tuple[int, int]:
        gpu = self.target.gpu
        return max(0, usable_memory(gpu, 1) - self._stats()["reserved_bytes.all.current"]), gpu.memory


class FakeGPU:
    """Predicted memory (in bytes) and time of a loop on a simulated card, so far or, after the block, in total."""

    card: GPU
    capacity: int  # memory for torch: the card's without CUDA's context; can be set to a smaller value
    fits: bool  # whether ``reserved`` is within the capacity; the loop itself never runs out of memory
    retries: int | None  # how often torch must release its cache to stay within the capacity; ``None``: impossible
    allocated: int  # peak memory of tensors, as torch.cuda.max_memory_allocated
    reserved: int  # peak memory of torch's allocator, as torch.cuda.max_memory_reserved
    host: int  # peak host memory of tensors created in the block, without Python, libraries and batches
    categories: dict[Category, int]  # memory at the allocated peak, by category
    largest: list[MemoryBlock]  # the largest blocks at the allocated peak
    peak_phase: str  # phase of the allocated peak
    phases: dict[str, peaks.PhasePeak]  # peaks within init, forward, backward, step, evaluation and other
    steps: int  # number of optimizer steps
    step_ms: float | None  # estimated GPU time of the last step; ``None`` without a step
    traffic: dict[str, int]  # bytes that the rank sends in the last step, by collective
    leaving: int  # bytes that its node sends to other nodes in the last step
    exposed_ms: float | None  # part of ``step_ms`` in which nothing overlaps the collectives
    kind: str  # eager, adapters, compiled, FSDP2 or old torch: the kind of published peaks to compare with
    notes: list[str]  # limits of the prediction
    timeline: dict[str, Any]  # data for a plot

    def __init__(self, tracer: UserLoopTracer, cluster: Cluster = ALONE, rank: int = 0) -> None:
        self.card, self.capacity = tracer.target.gpu, usable_memory(tracer.target.gpu, cluster.devices)
        self.ranks, self.nodes, self.rank = cluster.devices, cluster.nodes, rank
        self._tracer, self._found = tracer, ((-1, -1, -1), dict[str, Any]())

    def __getattr__(self, name: str) -> Any:  # the results are computed on access
        if name not in FakeGPU.__annotations__:
            raise AttributeError(f"a FakeGPU has no {name!r}")
        tracer = self._tracer
        seen = len(tracer.trace.events), tracer.steps, len(tracer.trace.notes)
        if self._found[0] != seen:
            self._found = seen, self._statistics()
        found = self._found[1]
        if name in ("fits", "retries"):  # these depend on the capacity
            retries = peaks.retries_within(tracer.trace, self.capacity, tracer.settings, found["memory"])
            return retries.times if name == "retries" else retries.times == 0
        return found[name]

    def _statistics(self) -> dict[str, Any]:
        tracer = self._tracer
        tracer.mark_batches()
        target, trace, cluster = tracer.target, tracer.trace, Cluster(self.ranks, self.nodes)
        memory, cost = peaks.replay(trace, tracer.settings), None
        last = dataclasses.replace(trace, work=trace.work[slice(*tracer.step_work)])
        if tracer.steps:
            cost = cost_of(last, target, cluster, target.network)
        sent, leaving = traffic_of(last, cluster)
        notes = list(trace.notes)
        if not memory.peak_allocated:
            notes.append('no tensor is on the GPU: move the model and the batches with .to("cuda")')
        elif tracer.steps < 2:
            notes.append(f"{tracer.steps or 'no'} optimizer step was taken, but the peak of training is in the second")
        return {
            "memory": memory,
            "allocated": memory.peak_allocated,
            "reserved": memory.peak_reserved,
            "host": trace.host_bytes,
            "categories": memory.categories,
            "largest": tracer.describe_blocks(memory.blocks)[: peaks.LARGEST],
            "peak_phase": memory.allocated_phase or "init",
            "phases": memory.phases,
            "steps": tracer.steps,
            "step_ms": cost and cost.step_ms,
            "exposed_ms": cost and cost.exposed_ms,
            "traffic": {op: int(size) for op, size in sent.items()},
            "leaving": int(leaving),
            "kind": tracer.kind(),
            "notes": notes,
            "timeline": peaks.timeline_of(memory, trace),
        }

    def add_note(self, line: str) -> None:
        """Add a limit of the prediction that the simulator cannot know."""
        self._tracer.trace.add_note(line)

    def unseen(self) -> str:
        """Describe what a loop that was stopped here may still do and that needs more memory."""
        tracer = self._tracer
        tracer.mark_batches()
        batches = [block for number, block in tracer.made.items() if tracer.trace.categories.get(number) == "batch"]
        frozen = sum(one.numel() * one.element_size() for one in tracer.weights() if not one.requires_grad)
        later = [] if "evaluation" in (phase for _, phase in tracer.trace.marks) else ["evaluation"]
        later += [f"unfreezing of {format_bytes(frozen)} of weights"] if frozen else []
        shape = list(max(batches, key=lambda block: block.bytes).shape) if batches else []
        later.append(f"batches larger than {shape}" if shape else "longer batches")
        listed = " and ".join(filter(None, [", ".join(later[:-1]), later[-1]]))
        stopped = f"stopped after {tracer.steps} step{'s' if tracer.steps > 1 else ''}"
        return f"{stopped}; {listed} later in the script were not seen"

    def snapshot(self) -> dict[str, Any]:
        """Return what ``torch.cuda.memory._snapshot()`` would: a pickle of it is for https://pytorch.org/memory_viz.

        Instead of lines of code, a block has its category, its tensor or operation, and its phase.
        """
        tracer, frames = self._tracer, {}
        tracer.mark_batches()
        for event in (event for event in tracer.trace.events if event.bytes):
            (block,) = tracer.describe_blocks([event])
            shape = f"{list(block.shape)} {block.dtype}" if block.dtype else ""
            texts = {"category": block.category, "tensor": f"{block.name} {shape}".strip(), "phase": block.phase}
            frames[event.id] = [{"filename": label, "line": 0, "name": text} for label, text in texts.items()]
        return snapshot(tracer.trace.events, tracer.settings, frames)

    def plot(self, path: str | Path) -> None:
        """Write a PNG with memory by category over allocations and frees; a RunError if no tensor was on the GPU."""
        if not self.allocated:
            raise RunError(f"{path} cannot be drawn: {self.notes[-1]}")
        if draw is None:
            raise RunError(f"{path} cannot be drawn: import fake_gpu from trainer.planner, which provides plots")
        draw(*self.picture, Path(path))

    @property
    def picture(self) -> tuple[dict[str, Any], int, str]:
        """The content of a plot: timeline, capacity in bytes and title."""
        return self.timeline, self.capacity, f"{self.card.title}, predicted: {self._verdict}"

    def to_json(self) -> dict[str, Any]:
        """Return all results except the timeline in plain types, with memory in GB (1e9 bytes)."""
        sizes = {name: getattr(self, name) for name in ("capacity", "allocated", "reserved", "host")}
        blocks = [one._asdict() for one in self.largest]
        phases = {name: peak._asdict() for name, peak in self.phases.items()}
        return {
            "card": self.card.name,
            **{name: getattr(self, name) for name in ("fits", "retries", "steps", "step_ms", "peak_phase", "notes")},
            **peaks.peaks_to_json(sizes, phases, self.categories),
            "largest": [{"gb": peaks.in_gb(one.pop("bytes")), **one} for one in blocks],
            "ranks": self._ranks_to_json(),
            "kind": self.kind,
            "expected_error": expected_error(self.kind),
        }

    def _ranks_to_json(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("ranks", "nodes", "rank", "exposed_ms")}
        sent = {op: peaks.in_gb(size) for op, size in self.traffic.items()}
        network = self._tracer.target.network.name
        return named | {"interconnect": network, "sent_gb": sent, "leaving_a_node_gb": peaks.in_gb(self.leaving)}

    @property
    def _collectives(self) -> str:
        sent = ", ".join(f"{format_bytes(size)} by {op}" for op, size in self.traffic.items()) or "nothing"
        over = f"; {format_bytes(self.leaving)} leave its node over {self._tracer.target.network.name}"
        on = (f"on {self.nodes} nodes" if self.nodes > 1 else "on one node") + f" sends {sent}{over * (self.nodes > 1)}"
        return f"{self.rank} of {self.ranks} {on}; {self.exposed_ms or 0:,.1f} ms of the step wait for it"

    @property
    def _verdict(self) -> str:
        needs = "" if self.retries is not None else f": it needs {format_bytes(self.reserved)}"
        return f"it {peaks.Retries(self.retries)}{needs}"

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.categories.items())
        largest = "; ".join(f"{one.name} {list(one.shape)} {format_bytes(one.bytes)}" for one in self.largest[:3])
        rows = {
            "card": f"{self.card.title} with {format_bytes(self.capacity)} for torch: {self._verdict}",
            "reserved": f"{format_bytes(self.reserved)}; tensors take {format_bytes(self.allocated)} of it",
            "peak": f"in {self.peak_phase}: {parts or 'nothing'}",
            "largest": largest or "nothing",
            "host": format_bytes(self.host),
            "step": "no step was taken" if self.step_ms is None else f"{self.step_ms:,.1f} ms, estimated",
            **({"rank": self._collectives} if self.ranks > 1 else {}),
            "error": expected_error(self.kind),
            "notes": "; ".join(self.notes) or "none",
        }
        return "\n".join(wrapped(f"{label:<9} {text}", " " * 10) for label, text in rows.items())


@contextmanager
def fake_gpu(
    card: str | GPU,
    *,
    torch_version: str | None = None,
    ranks: int | None = None,
    nodes: int = 1,
    rank: int = 0,
    interconnect: str = DEFAULT_NETWORK,
) -> Iterator[FakeGPU]:
    """Simulate a GPU in the block and predict what the block would need on the real card, without weights.

    Tensors and modules that are created or moved in the block have no data and cannot be used after it. Data loaders
    stay real. Reading a floating-point value returns the number of ranks, and memory is unlimited.

    Args:
        card: a name such as ``"a100-80gb"``; an error lists all names.
        torch_version: the version, such as ``"2.6"``, whose kernels the card would run; default: the installed one.
        ranks: number of processes that torchrun starts, with one such card each, on ``nodes``; default: no torchrun.
        nodes: number of machines.
        rank: the rank that the block is. The others are simulated: they do the same.
        interconnect: network between devices, as in ``trainer plan --interconnect``.

    Raises:
        RecipeError: a wrong argument, or what cannot be simulated, such as FSDP1 and messages between two ranks.
        RunError: the block is in another such block, or this process has already used its GPU.
    """
    gpu = gpu_named(card) if isinstance(card, str) else card
    version = re.fullmatch(r"(\d+)\.(\d+).*", torch_version or "0.0")
    if version is None:
        raise RecipeError(f"torch_version={torch_version!r} must be a version such as '2.6'")
    major, minor = map(int, version.groups())
    cluster = check_cluster(1 if ranks is None else ranks, nodes, rank)
    require(len(interconnects(interconnect, gpu)) == 1, f"interconnect={interconnect} must be one name")
    target = dataclasses.replace(Target.here(gpu, interconnect), torch_version=(major, minor))
    with tracing(target, cluster.devices, cluster.nodes, kind=UserLoopTracer) as tracer:
        assert isinstance(tracer, UserLoopTracer)
        simulate_ranks(cluster, rank, is_launched=ranks is not None)
        tracer.enter("init")
        yield FakeGPU(tracer, cluster, rank)
