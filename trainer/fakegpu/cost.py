"""Estimate of the time of a step from its operations, to rank plans.

An operation takes the longer of its arithmetic and its memory traffic (the roofline model: Williams, Waterman and
Patterson, 2009) plus a part of the shorter, because a product computes nothing while it reads its first and writes its
last tiles. No constant in this file was fitted to a training step. Errors of predicted steps: docs/planner/accuracy.md.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from trainer.fakegpu.events import HOST_STREAM, HOST_THREAD, Operation, Trace
from trainer.fakegpu.gpus import GPU
from trainer.fakegpu.network import Cluster, Interconnect, sent

if TYPE_CHECKING:
    from trainer.fakegpu.target import Target  # it imports torch

# Achieved fraction of the data sheet's memory bandwidth in large copies and elementwise kernels: the median of 14
# measurements with torch, from 0.73 on an A100 to 0.91 on a 4090 (github.com/chsasank/device-benchmarks,
# github.com/mli/transformers-benchmarks).
MEMORY = 0.83
# ``EXPOSED``: the fraction of the shorter of arithmetic and traffic without overlap. ``KERNEL``: seconds to start,
# fill and drain a kernel. Both were fitted to square products of 1,024 to 4,096 rows on 16 cards
# (``tests/fakegpu/test_cost.py``): root mean square error 15 %; 20 % with full overlap, 17 % without overlap.
EXPOSED, KERNEL = 0.5, 4e-6
# Elements per clock that a multiprocessor reads or writes in kernels other than products. This, not memory, limits an
# A100 in half precision: layers of BERT-large and GPT-2 medium match values of 3.3 and 2.1
# (github.com/mli/transformers-benchmarks). Predictions for a V100, an A6000 and a 3090 Ti are within 8 % regardless.
ELEMENTS = 2.6
# Speed of attention kernels relative to products: FlashAttention-2 reaches 50 to 73 % of an A100's peak, products 83 %
# (Dao, 2023); cuDNN's attention reaches about 55 % of an H100's peak (Shah et al., 2024).
ATTENTION = 0.72
# CPU seconds per operation. The CPU runs ahead of the GPU, so a phase takes the longer of both. Not measured.
# ``LAUNCH``: an operation in eager mode, with autograd and Python. Assumed; usual: 5 to 25 µs; ``a * 1.2`` alone
# took 2.7, 4.3 and 7.3 µs on three machines (github.com/mli/transformers-benchmarks, issue 4). ``view``: an operation
# without a kernel, 1.0 to 1.9 µs on a CPU. ``chunk`` of the optimizer offload, without its copies: assumed; 40 to
# 60 µs with them (``TransferStream.gradient_to_host``). ``fused``: merged by the compiler with the previous kernel.
LAUNCH, NO_KERNEL = 8e-6, {"view": 1.5e-6, "chunk": 25e-6, "fused": 0.0}
# Seconds to free one cached segment when torch runs out of memory, and to take it again later. Assumed: ``cudaFree``
# waits for all queued work (Paszke et al., 2019, section 5.3); neither call was measured.
CUDA_FREE = 0.5e-3
COPY = 10e-6  # seconds to start a copy over the bus; assumed, typical are 5 to 20 µs
# Bytes/s of one rank's optimizer on the host. Assumed: Adam on a billion weights takes 1.39 s in plain torch and 0.22 s
# in DeepSpeed's kernel on two large sockets (ZeRO-Offload, Ren et al., 2021, table 4), which is 20 to 127 GB/s.
HOST_MEMORY = 40e9
GLOO_BANDWIDTH = 1e9  # bytes/s of gloo in host memory; measured: 0.2 s for 188 MB on 2 ranks of one machine
ERROR = 0.2  # RMS error of the logarithm of predicted step times: docs/planner/accuracy.md, "Times"
ESTIMATES = f"estimates, ± {100 * ERROR:.0f} % (root mean square): to rank plans on a card, less so to rank cards"
TAKES_WEIGHTS = "split_with_sizes_copy"  # FSDP2's first operation on gathered weights: it waits for their all-gather
Seconds = Callable[[Operation], tuple[str, float]]  # link and seconds of a collective


def kernel_seconds(item: Operation, gpu: GPU) -> float:
    """Return the seconds of one kernel from its arithmetic, at the rate of products, and its memory traffic."""
    if not item.flops and not item.bytes:
        return 0.0
    rate = gpu.product_rate(item.dtype) * (ATTENTION if "attention" in item.op else 1.0)
    moves = gpu.bandwidth * MEMORY
    if not item.flops:
        bits = re.search(r"\d+", item.dtype)
        moves = min(moves, ELEMENTS * (int(bits[0]) / 8 if bits else 1) * gpu.clocks)
    arithmetic, traffic = item.flops / rate, item.bytes / moves
    return KERNEL + max(arithmetic, traffic) + EXPOSED * min(arithmetic, traffic)


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a step. The times of the kinds of work are sums that ignore overlap."""

    step_ms: float  # duration of the step, with overlap
    alone_ms: float  # the same without collectives
    update_ms: float  # part of ``step_ms`` after the last backward
    compute_ms: float  # kernels
    launch_ms: float  # CPU time for launches, while the GPU computes
    transfer_ms: float  # copies over the bus
    communication_ms: float  # collectives
    host_ms: float  # the optimizer on the CPU, during the last backward or after it
    retry_ms: float = 0.0  # part of ``step_ms`` in which torch's allocator releases its cache

    @property
    def work_ms(self) -> float:
        """The step without the retries of the allocator."""
        return self.step_ms - self.retry_ms

    def with_retries(self, freed: float) -> StepCost:
        """Return the cost of a step in which the allocator frees ``freed`` segments to stay within its capacity."""
        waits = 1e3 * freed * CUDA_FREE
        return replace(self, step_ms=self.work_ms + waits, alone_ms=self.alone_ms + waits, retry_ms=waits)

    @property
    def exposed_ms(self) -> float:
        """Time that collectives add to the step because nothing overlaps them."""
        return self.step_ms - self.alone_ms


def changed(work: Sequence[Operation], units: str | None) -> list[Operation]:
    """Return ``work`` with fp32 products in ``units`` or, if ``units`` is ``None``, as compiled.

    Compiled means: consecutive operations of a phase, except products, norms and copies, become one kernel with the
    traffic of the largest. This shortens two published steps (GPT-2 with flash attention and Llama 3.2 3B) by 14 and
    23 %; compiling them saved 18 and 21 %.
    """
    if units:
        return [one._replace(dtype=units) if one.flops and one.dtype == "float32" else one for one in work]
    found: list[Operation] = []
    for key, items in groupby(work, lambda one: one.phase if _is_fusible(one) else one):
        run = sorted(items, key=lambda one: -one.bytes)
        found += [run[0], *(one._replace(op="fused", bytes=0) for one in run[1:])] if isinstance(key, str) else run
    return found


def _is_fusible(one: Operation) -> bool:
    return one.kind == "compute" and not one.flops and not one.stream and one.phase != "step" and "norm" not in one.op


def cost_of(trace: Trace, target: Target, cluster: Cluster, network: Interconnect) -> StepCost:
    """Return the time of the last step of ``trace`` on ``cluster``, connected by ``network``."""

    def seconds(item: Operation) -> tuple[str, float]:
        group = cluster.group(item.ranks, item.stride)
        link = "between" if group.nodes > 1 else "within"
        if item.stream < 0:  # gloo, in host memory
            rate = min(GLOO_BANDWIDTH, network.inter_node.bandwidth) if group.nodes > 1 else GLOO_BANDWIDTH
            return link, sent(item.op, item.bytes, group) / rate
        return link, network.seconds(item.op, item.bytes, group)

    return step_cost(trace, target.gpu, seconds)


def step_cost(trace: Trace, gpu: GPU, seconds: Seconds) -> StepCost:
    """Return the time of the last step of ``trace``; micro-steps that were not traced count as the middle one."""
    return StepCost(*(1e3 * time for time in extrapolate_step(trace, lambda work: _times(work, gpu, seconds))))


def peak_seconds(trace: Trace, gpu: GPU) -> float:
    """Return the seconds of the last step's forward and backward FLOPs at the card's peak, without recomputation."""

    def seconds(work: Sequence[Operation]) -> list[float]:
        own = [item for item in work if item.phase in ("forward", "backward") and not item.is_recompute]
        return [sum(item.flops / gpu.flops.get(item.dtype, gpu.flops["float32"]) for item in own if item.flops)]

    return extrapolate_step(trace, seconds)[0]


def extrapolate_step(trace: Trace, measure: Callable[[Sequence[Operation]], list[float]]) -> list[float]:
    """Return ``measure`` of the last step; each micro-step that was not traced adds the values of the middle one."""
    work, more, once = trace.work, trace.skipped_micro_steps, measure(trace.work)
    if not more:
        return once
    begin, end = trace.micro_steps[-3:-1]
    twice = measure(work[:end] + work[begin:end] + work[end:])
    return [a + more * (b - a) for a, b in zip(once, twice, strict=True)]


def traffic_of(trace: Trace, cluster: Cluster) -> tuple[dict[str, float], float]:
    """Return the bytes that a rank sends per step, by collective, and those that its node sends to others."""
    ops = list(dict.fromkeys(item.op for item in trace.work if item.kind == "collective"))

    def measure(work: Sequence[Operation]) -> list[float]:
        by_op, leaving = dict.fromkeys(ops, 0.0), 0.0
        for item in work:
            if item.kind == "collective":
                group = cluster.group(item.ranks, item.stride)
                size = sent(item.op, item.bytes, group)
                by_op[item.op] += size
                leaving += size * group.concurrent_groups if group.nodes > 1 else 0.0
        return [*by_op.values(), leaving]

    *sizes, leaving = extrapolate_step(trace, measure)
    return dict(zip(ops, sizes, strict=True)), leaving


def _times(work: Sequence[Operation], gpu: GPU, seconds: Seconds) -> list[float]:
    """Return the fields of :class:`StepCost` in seconds."""
    clocks = ResourceClocks(gpu, seconds)
    step = alone = clocks.run(work)
    if clocks.busy["communication"]:
        alone = ResourceClocks(gpu, lambda item: (seconds(item)[0], 0.0)).run(work)
    kinds = ("compute", "launch", "transfer", "communication", "host")
    return [step, alone, step - clocks.began.get("step", step), *(clocks.busy[kind] for kind in kinds)]


class ResourceClocks:
    """Simulated clocks of one rank: CPU launches, GPU, each link and each direction of the bus.

    Operations run in order, each when its inputs and its resource are free. This gives the overlap of the strategies:

    * DDP reduces a bucket when its gradients are complete, during the rest of the backward.
    * FSDP2 gathers the next block's weights while a block computes, one ahead (``wait_for_unshard`` of torch's
      ``_fsdp_param_group.py``), and reduces a block's gradients during the backward of the blocks before it.
    * Both wait for all reductions at the end of a backward. The host updates when its inputs have arrived.
    * A host thread updates arrived gradients during the last backward (``memory/eager_update.py``), if gradients are
      not clipped. Copies that it has not started at the end of backward are unnecessary.
    """

    def __init__(self, gpu: GPU, seconds: Seconds) -> None:
        self.gpu, self.seconds = gpu, seconds
        self.launched = self.computed = self.reduced = self.may_gather = self.took_weights = 0.0
        self.ahead: list[tuple[float, Operation]] = []  # (earliest start, work) of the host thread
        self.free: dict[str, float] = defaultdict(float)
        self.busy: dict[str, float] = defaultdict(float)
        self.gathered: deque[float] = deque()
        self.phase = ""
        self.began: dict[str, float] = {}

    def run(self, work: Sequence[Operation]) -> float:
        """Return the seconds until all of ``work`` is done."""
        for item in work:
            if item.phase != self.phase:
                # Backward waits for its reductions, forward for weights copied to the device.
                self.computed = max(self.computed, self.free["to_device"])
                if self.phase == "backward":
                    self.computed = self._all_done()
                self.phase = item.phase
                self.began[item.phase] = self._all_done()
                self._update_ahead()
            self._do(item)
        return self._all_done()

    def _update_ahead(self) -> None:
        """Account for the host thread's work in the phase that ends now."""
        end, done = self._all_done(), 0.0
        for arrived, item in self.ahead:
            if item.op != "copy_" or max(done, arrived) < end:
                done = max(done, arrived) + item.bytes / HOST_MEMORY
                self.busy["host"] += item.bytes / HOST_MEMORY
        self.ahead.clear()
        self.launched = self.computed = max(end, done)

    def _all_done(self) -> float:
        return max(self.launched, self.computed, *self.free.values(), 0.0)

    def _do(self, item: Operation) -> None:
        if item.stream == HOST_THREAD:
            self.ahead.append((max(self.launched, self.free["to_host"]), item))
            return
        if item.stream == HOST_STREAM:  # starts when all its inputs have arrived
            reduces = item.kind == "collective"
            seconds = self.seconds(item)[1] if reduces else item.bytes / HOST_MEMORY
            self.busy["communication" if reduces else "host"] += seconds
            self.launched = self.computed = self._all_done() + seconds
            return
        on_host = NO_KERNEL.get(item.op, LAUNCH)
        self.busy["launch"] += on_host
        self.launched += on_host
        if item.kind == "compute":
            self._compute(item)
        elif item.kind == "collective":
            self._communicate(item)
        else:
            self._copy(item)

    def _compute(self, item: Operation) -> None:
        begin = max(self.launched, self.computed)
        takes = item.op == TAKES_WEIGHTS and bool(self.gathered)
        if takes:
            begin = max(begin, self.gathered.popleft())
        seconds = kernel_seconds(item, self.gpu)
        self.busy["compute"] += seconds
        self.computed = begin + seconds
        if takes:
            # An all-gather waits for the use of the previous weights in forward, of these weights in backward.
            self.may_gather = self.took_weights if item.phase == "forward" else self.computed
            self.took_weights = self.computed

    def _communicate(self, item: Operation) -> None:
        link, seconds = self.seconds(item)
        self.busy["communication"] += seconds
        begin = max(self.launched, self.free[link])
        if item.op == "all_gather" and item.stream:
            self.free[link] = max(begin, self.may_gather) + seconds
            self.gathered.append(self.free[link])
            return
        self.free[link] = end = max(begin, self.computed, self.reduced) + seconds
        if item.phase == "backward" and not item.is_blocking:
            self.reduced = end
        else:  # such as the gradient norm, or a sum of tensor parallelism within a block
            self.computed = end

    def _copy(self, item: Operation) -> None:
        seconds = COPY + item.bytes / self.gpu.bus
        self.busy["transfer"] += seconds
        needs = self.computed if item.kind == "to_host" or not item.stream else 0.0
        self.free[item.kind] = max(self.launched, self.free[item.kind], needs) + seconds
        if not item.stream:
            self.computed = self.free[item.kind]
