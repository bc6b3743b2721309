"""``memory.cpu_offload``: gradients, fp32 master weights and optimizer state live in host memory.

Each gradient is copied to an fp32 accumulator on a separate stream as soon as it is ready, and is freed. The optimizer
updates the master weights on the host; some updates run during the last backward already: see ``eager_update.py``. With
``parameters``, FSDP streams the weights too. See docs/techniques/offload.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from trainer.engine.sync import GradientSync, begin_mean, gradient_rank_counts, norm_over_ranks, total_norm
from trainer.engine.window import Window
from trainer.memory.eager_update import EagerOptimizerUpdate
from trainer.memory.muon import Muon
from trainer.memory.plan import Plan
from trainer.memory.sharding import AMP_DTYPES, local_shard, move_buffers
from trainer.recipe import Precision

CHUNK, MAX_CHUNK = 2**19, 2**23
"""Bounds for the elements of a chunk, which is an eighth of the largest tensor. 2 MB in fp32 use the full speed of the
bus, but each chunk costs about 50 us of Python on the thread that launches the backward."""

IN_FLIGHT = 2  # max gradients being copied to the host; a third waits, so that the peak does not depend on timing

BUCKET = 2**23
"""Elements of the accumulators that are reduced over ranks at once (32 MB in fp32), once per step. For 47 million
parameters on 2 gloo ranks this takes 0.2 s, against 2.0 s for each gradient of each of 4 micro-steps."""

PIECE, MAX_PIECE = 2**24, 2**28
"""Bounds for the elements of one host allocation, unless one tensor is larger: 64 MB to 1 GB in fp32."""

CAST_BY_AUTOCAST = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)


def make_host_master_weights(module: nn.Module, plan: Plan, device: torch.device) -> dict[nn.Parameter, Tensor]:
    """Create the master weights in host memory, and put the weights for forward and backward on ``device``.

    The weights of ``module`` are in fp32 (fp64 for ``64-true``), on the host or sharded by FSDP. Returns a master for
    each parameter that trains, or that the device does not hold exactly. It has the shape of the parameter (under FSDP
    of the local shard), and is pinned if the device is a GPU.
    """
    masters: dict[nn.Parameter, Tensor] = {}
    dtypes = dict.fromkeys(_kept_in_half(module, plan.memory.precision), AMP_DTYPES.get(plan.memory.precision))

    def send(parameter: nn.Parameter) -> None:
        if not isinstance(parameter, DTensor):  # FSDP's shards are on the device already, and are cast when gathered
            dtype = dtypes.get(parameter, parameter.dtype)
            # Contiguous like the masters, because both are cut into chunks.
            parameter.data = parameter.detach().to(device, dtype, copy=True, memory_format=torch.contiguous_format)

    mastered = [p for p in module.parameters() if p.requires_grad or not _survives(p, dtypes.get(p))]
    kept = {p: local_shard(p.detach()) for p in mastered}
    for parameter in [p for p in module.parameters() if p not in kept]:
        send(parameter)
    for _, parts in in_pieces(kept, device.type == "cuda"):
        for parameter, host in parts.items():
            masters[parameter] = host.copy_(kept.pop(parameter)).requires_grad_(parameter.requires_grad)
            send(parameter)  # frees the weights one by one
    move_buffers(module, device)
    return {parameter: masters[parameter] for parameter in module.parameters() if parameter in masters}


def _survives(parameter: nn.Parameter, half: torch.dtype | None) -> bool:
    """Return whether a frozen parameter is exact in ``half`` precision, as weights saved in it; ``None``: its dtype."""
    if half is None or isinstance(parameter, DTensor):
        return True
    return parameter.dtype == torch.float32 and torch.equal(parameter.to(half).float(), parameter)


def _kept_in_half(module: nn.Module, precision: Precision) -> set[nn.Parameter]:
    """Return the parameters that only half-precision operations use: under autocast a part of them."""
    if precision not in AMP_DTYPES:
        return set()
    if precision in ("bf16-true", "16-true"):
        statistics = [part for part in module.modules() if isinstance(part, _BatchNorm)]  # kept in fp32
        real = {parameter for parameter in module.parameters() if parameter.is_floating_point()}
        return real - {p for part in statistics for p in part.parameters()}
    inside: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()  # a tied embedding is in both
    for part in module.modules():
        (inside if isinstance(part, CAST_BY_AUTOCAST) else others).update(part.parameters(recurse=False))
    return inside - others


class HostGradientSync(GradientSync):
    """Accumulates gradients in host memory, and reduces them over ranks there.

    ``masters`` come from ``make_host_master_weights`` and get their gradients after the last backward of a window.
    After each step of ``optimizer``, the new weights are copied to ``device``. ``replicas`` ranks hold a shard.
    """

    def __init__(
        self,
        masters: dict[nn.Parameter, Tensor],
        device: torch.device,
        optimizer: Optimizer,
        world_size: int,
        replicas: int = 1,
        scaler: Any = None,
    ) -> None:
        super().__init__(list(masters.values()))
        self.masters, self.device, self.world_size, self.replicas = masters, device, world_size, replicas
        self.sharded = any(isinstance(p, DTensor) for p in masters)
        self.reduced = world_size > 1 and not self.sharded  # gradients from FSDP are already reduced
        self.pieces, self.members = zip(*in_pieces(masters, device.type == "cuda"), strict=True)
        self.accumulators = {parameter: home for members in self.members for parameter, home in members.items()}
        options = self.pieces[0].dtype, self.sharded, max(master.numel() for master in masters.values())
        self.carrier = TransferStream(device, *options) if device.type == "cuda" else None
        self.arrived: set[nn.Parameter] = set()
        self.tied: Any = None  # the TiedEmbeddingGradient whose parameter's gradient comes in rows
        for parameter in masters:
            self.on_gradient(parameter, self._on_gradient)
        pays = device.type == "cuda" and not isinstance(optimizer, Muon)  # Muon may wait for other ranks
        self.ahead, self.is_complete = EagerOptimizerUpdate(optimizer, scaler, world_size, pays), False
        optimizer.register_step_post_hook(lambda *_: self._stepped())

    def begin(self, window: Window) -> None:
        self.ahead.undo()  # updates of a failed step
        self.is_complete = False

    def before_last_backward(self) -> None:
        self.ahead.begin_last_backward()
        self.is_complete = not self.reduced  # otherwise gradients are those of this rank only

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:  # FSDP may also call the hooks of parameters without a gradient
            return
        gradient, parameter.grad = self._gradient(parameter), None
        home, adds = self.accumulators[parameter], parameter in self.arrived
        self.arrived.add(parameter)
        if self._master_and_gradient(parameter)[0] in self.ahead.taken:  # a nested backward has added a part before
            self.ahead.undo()
        arrived = self.accumulate_on_host(gradient, home, adds)
        if self.is_complete:
            self.ahead.take(*self._master_and_gradient(parameter), arrived)

    def accumulate_on_host(
        self, gradient: Tensor, accumulator: Tensor, accumulate: bool, held: bool = False
    ) -> Callable[[], None] | None:
        """Copy ``gradient`` to ``accumulator``, or add it there; return a function that waits for that, if needed.

        With ``held``, the memory of ``gradient`` is not reused before."""
        if self.carrier is not None:
            return self.carrier.gradient_to_host(gradient, accumulator, accumulate, held).synchronize
        (accumulator.add_ if accumulate else accumulator.copy_)(gradient)
        return None

    def _master_and_gradient(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        return self.masters[parameter], self.accumulators[parameter]

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return local_shard(parameter.grad)

    @torch.no_grad()
    def after_last_backward(self) -> None:
        """Wait for the last gradient, and average over ranks."""
        if self.carrier is not None:
            self.carrier.wait()
        if self.tied is not None:
            self.tied.flush()
        reached = [parameter in self.arrived for parameter in self.masters]
        if self.reduced:
            counts = gradient_rank_counts(reached, torch.device("cpu"))
            for parameter, here, count in zip(self.masters, reached, counts, strict=True):
                if count and not here:
                    self.accumulators[parameter].zero_()
            reached = [bool(count) for count in counts]
            self._reduce({p for p, is_reached in zip(self.masters, reached, strict=True) if is_reached})
        self.ahead.stop()
        for (parameter, master), is_reached in zip(self.masters.items(), reached, strict=True):
            master.grad = self.accumulators[parameter] if is_reached else None
        self.arrived.clear()

    def _reduce(self, reached: set[nn.Parameter]) -> None:
        begun: list[Callable[[], None]] = []
        for number, members in enumerate(self.members):
            begun += [begin_mean(piece.split(BUCKET)) for piece in self.pieces[len(begun) : number + 2]]
            begun[number]()
            for parameter in members:
                if parameter in reached:
                    self.ahead.take(*self._master_and_gradient(parameter))

    def abandon(self) -> None:
        if self.carrier is not None:
            self.carrier.wait()
        if self.tied is not None:
            self.tied.discard()
        self.ahead.undo()
        self.arrived.clear()

    def norm(self) -> Tensor:
        """Return the global norm, computed on the host; under FSDP from the shards of all ranks."""
        known = self.ahead.norms if self.alike else {}
        if known:
            reached = [(self._master_and_gradient(p)[0], m.grad) for p, m in self.masters.items() if m.grad is not None]
            norms = [known[p] if p in known else torch.linalg.vector_norm(gradient) for p, gradient in reached]
            norm = torch.linalg.vector_norm(torch.stack(norms))
        else:
            norm = total_norm([master.grad for master in self.parameters if master.grad is not None], self.alike)
        return norm_over_ranks(norm, self.replicas) if self.sharded else norm

    def clip(self, norm: Tensor, max_norm: float | None) -> None:
        if not self.ahead.commit_or_undo(norm, max_norm):
            super().clip(norm, max_norm)

    def skip(self) -> None:
        self.ahead.undo()

    def _stepped(self) -> None:
        self.ahead.commit()
        self.copy_to_device()

    @torch.no_grad()
    def copy_to_device(self) -> None:
        """Copy the master weights to the device, rounded to the dtype of the parameters.

        The host rounds them into the memory of their gradients. This is safe, because the next computation waits for
        the copies, and the next gradients come after it.
        """
        for parameter, master in self.masters.items():
            target, source = local_shard(parameter.detach()), master.detach()
            if self.carrier is not None and target.dtype != source.dtype:
                room = self.accumulators[parameter].view(-1).view(target.dtype)[: source.numel()]
                source = room.view(source.shape).copy_(source)
            target.copy_(source, non_blocking=True)


def in_pieces(like: Mapping[nn.Parameter, Tensor], pinned: bool) -> Iterator[tuple[Tensor, dict[nn.Parameter, Tensor]]]:
    """Allocate host memory for a tensor like each of ``like``: yield flat pieces, each with the tensors cut from it.

    Torch rounds pinned memory up to a power of two: pieces are powers of two with the smallest unused share, filled
    with the largest remaining tensors (first-fit decreasing).
    """
    sizes = {p: like[p].numel() for p in sorted(like, key=lambda p: -like[p].numel())}

    def filling(bits: int) -> list[nn.Parameter]:
        room, found, dtype = 2**bits, [], like[next(iter(sizes))].dtype
        for parameter, size in sizes.items():
            if size <= room and like[parameter].dtype == dtype:
                found.append(parameter)
                room -= size
        return found

    def unused(group: list[nn.Parameter]) -> int:
        total = sum(sizes[parameter] for parameter in group)
        return 100 - 100 * total // 2 ** (total - 1).bit_length()

    while sizes:
        least = (max(PIECE, *sizes.values()) - 1).bit_length()
        group = min(map(filling, range(least, max(least + 1, MAX_PIECE.bit_length()))), key=unused)
        numbers = [sizes.pop(parameter) for parameter in group]
        piece = torch.zeros(sum(numbers), dtype=like[group[0]].dtype, pin_memory=pinned)
        yield piece, {p: part.view(like[p].shape) for p, part in zip(group, piece.split(numbers), strict=True)}


class StreamedGradientSync(HostGradientSync):
    """Takes gradients of each FSDP part of ``module``, with shards in host memory, as soon as they are reduced.

    All ``parameters`` have the same dtype, and gradients are accumulated in it, as FSDP does. The ``options`` are those
    of the base class.
    """

    @staticmethod
    def serves(parameters: Sequence[nn.Parameter], world_size: int) -> bool:
        """Return whether reduced gradients need only a cast: FSDP divides fp64 of more than two ranks once more."""
        dtypes = {parameter.dtype for parameter in parameters}
        return len(dtypes) == 1 and (dtypes != {torch.float64} or world_size <= 2)

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], *options: Any) -> None:
        super().__init__({parameter: local_shard(parameter.detach()) for parameter in parameters}, *options)
        self.in_one, self.expected, self.unused = torch.empty(0), 0, torch.empty(0)
        self.shards: dict[nn.Parameter, DTensor] = {}
        parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        part_of = {p: part for part in parts for p in part.parameters() if p.requires_grad}  # inner parts win
        sizes = Counter(part_of.values())
        for part in parts:
            part.set_all_reduce_hook(partial(self._take, sizes[part]))
        self.groups = [group for part in parts if (group := part._get_fsdp_state()._fsdp_param_group) is not None]

    def before_last_backward(self) -> None:
        """Allow updates during the last backward only if every part was used once.

        With a reentrant checkpoint a part gets a gradient after each use, and its weights are gathered again.
        """
        if all(len(group._post_forward_indices) < 2 for group in self.groups):
            super().before_last_backward()

    def _take(self, expected: int, reduced: Tensor) -> None:
        """Take the shards of a part's gradients from FSDP, and leave a host buffer that it need not cast instead."""
        if len(self.unused) < len(reduced):
            self.unused = torch.empty(reduced.shape, dtype=self.pieces[0].dtype, device="cpu")
        self.in_one, self.expected = reduced.detach().to(self.unused.dtype), expected
        reduced.data = self.unused[: len(reduced)]

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        shard = parameter.grad
        assert isinstance(shard, DTensor)
        cut = local_shard(shard)
        gradient = self.in_one.as_strided(cut.shape, cut.stride(), cut.storage_offset())
        self.expected -= 1
        if not self.expected:  # if the loss did not reach all of the part, the next part frees the memory
            self.in_one = torch.empty(0)
        shard._local_tensor = self.accumulators[parameter]  # ``from_local`` would move it to the device
        self.shards[parameter] = shard
        return gradient

    def _master_and_gradient(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        return parameter, self.shards[parameter]

    @torch.no_grad()
    def after_last_backward(self) -> None:
        """Wait for the last gradient, and give the optimizer DTensors again."""
        super().after_last_backward()
        for parameter, master in self.masters.items():
            if master.grad is not None:
                parameter.grad = self.shards[parameter]

    def copy_to_device(self) -> None:
        """No-op: the weights are streamed from the memory in which the optimizer updates them."""


class TransferStream:
    """Moves tensors between a GPU and pinned host memory in chunks, concurrently with the computation.

    One chunk comes from the host while the sum of another goes there (full duplex). ``largest`` is the number of
    elements of the largest tensor. With ``caller_waits``, the stream that allocates gradients waits for ``going``
    before the next one, so that each can be freed at once. Otherwise the computing stream waits for the oldest copies.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, caller_waits: bool = False, largest: int = 0) -> None:
        self.device, self.caller_waits = device, caller_waits
        self.chunk = chunk_size(largest)
        self.coming, self.going = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.staging = torch.empty(2, self.chunk, dtype=dtype, device=device)
        self.gone = [self.going.record_event(), self.going.record_event()]  # for each half of ``staging``
        self.turn = 0
        self.in_flight: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self.written: set[int] = set()  # addresses written by ``going`` since ``coming`` last waited for it
        self.chunks: Callable[[Tensor, Tensor, int], Iterable[tuple[Tensor, Tensor]]] = in_chunks
        """Cuts a transfer into chunks. The planner replaces it, to trace a single chunk."""

    def gradient_to_host(self, gradient: Tensor, home: Tensor, adds: bool, held: bool = False) -> torch.cuda.Event:
        """Copy ``gradient`` to ``home``, or add it there on the device; return at once, with an event for the end.

        With ``held``, ``gradient`` is not freed before the event, even if the ``caller_waits``.
        """
        current = torch.cuda.current_stream(self.device)
        self.going.wait_stream(current)
        if home.data_ptr() in self.written:
            self.coming.wait_stream(self.going)
            self.written.clear()
        self.written.add(home.data_ptr())
        with torch.cuda.stream(self.going):
            for ours, theirs in self.chunks(gradient.reshape(-1), home.view(-1), self.chunk):
                self.turn = 1 - self.turn
                staged = self.staging[self.turn, : len(ours)]
                if adds:
                    self.coming.wait_event(self.gone[self.turn])
                    with torch.cuda.stream(self.coming):
                        staged.copy_(theirs, non_blocking=True)
                    self.going.wait_stream(self.coming)
                    staged.add_(ours)
                else:
                    staged.copy_(ours)
                theirs.copy_(staged, non_blocking=True)
                self.gone[self.turn] = self.going.record_event()
        gone = self.gone[self.turn]
        if held or not self.caller_waits:
            self.in_flight.append((gradient, gone))
        if len(self.in_flight) > IN_FLIGHT:
            _, done = self.in_flight.popleft()
            current.wait_event(done)  # before the memory of the oldest gradient is reused
        return gone

    def fetch(self, tensor: Tensor) -> Tensor:
        """Start a copy of ``tensor`` to new host memory; the caller must keep ``tensor`` until ``wait``."""
        self.going.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.going):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.device.type == "cuda")
            return host.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait until every gradient has arrived."""
        self.going.synchronize()
        self.in_flight.clear()
        self.written.clear()


class ReduceAfterOffload(DefaultReduceScatter):
    """FSDP's reduce-scatter into memory of gradients that left for the host; only FSDP's stream waits for them."""

    def __init__(self, carrier: TransferStream) -> None:
        self.carrier, self.computing = carrier, torch.cuda.current_stream(carrier.device)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the input on the computing stream, and the output on FSDP's stream."""
        if (current := torch.cuda.current_stream(device)) != self.computing:
            current.wait_stream(self.carrier.going)  # for gradients to leave, whose memory it may reuse
        return super().allocate(size, dtype=dtype, device=device)


def reduce_after_offload(module: nn.Module, sync: HostGradientSync) -> None:
    """Let FSDP reuse the memory of gradients on a GPU as soon as ``sync`` has copied them to the host."""
    if sync.carrier is not None and sync.sharded:
        comm = ReduceAfterOffload(sync.carrier)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_reduce_scatter(comm)


def chunk_size(largest: int) -> int:
    """Return the elements of a chunk if the largest tensor has ``largest``: a multiple of 8, for vectorised code."""
    return max(CHUNK, min(largest // 64 * 8, MAX_CHUNK))


def in_chunks(first: Tensor, second: Tensor, size: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Cut two flat tensors of the same length into pairs of chunks of ``size`` elements."""
    return zip(first.split(size), second.split(size), strict=True)
