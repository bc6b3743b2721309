"""How long a step takes: an estimate from what it does, to rank plans by.

Each operation takes the longer of its arithmetic and its memory traffic (the roofline model: Williams, Waterman and
Patterson, 2009), copies and collectives what their link allows. The figures are rates of data sheets times what is
typically achieved: take the estimate for the order of plans, not for a promise. From a list
of what ViT-L/16 does, written by hand, it comes out at 0.98 of the time of a published run on an A100 in fp32, and at
0.7 in bf16 (the published times include loading data).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

from trainer.errors import require_positive
from trainer.planner.events import Trace, Work
from trainer.planner.gpus import GPU

TENSOR_CORES = 0.55
"""Of peak, in products on tensor cores: large square ones in isolation reach 0.65-0.7, the narrow ones of a transformer
and of weight gradients less, and all of them less under a power limit."""

OTHER_CORES = 0.85
"""Of peak, in large products in fp32 and fp64 without tensor cores: their operands arrive faster than they compute."""

MEMORY = 0.8
"""Of the bandwidth of the data sheet, in elementwise kernels: DRAM refreshes, and turns between reading and writing."""

KERNEL = 4e-6
"""Seconds that a kernel takes at least, and more than the roofline: it starts, fills the GPU and drains. This makes
small products inefficient: one of 0.7 GFLOP in bf16 reaches half of what a large one does on an A100."""

LAUNCH = 8e-6
"""Seconds of the CPU for one operation in eager mode, autograd and Python included."""

COPY = 10e-6
"""Seconds to start a copy over the bus."""

HOP = 10e-6
"""Seconds that a collective takes for every doubling of the ranks, however small it is: 30 µs on eight."""

NETWORK = 25e9
"""Bytes a second that leave a node, over all its adapters: one of 200 Gbit/s."""

HOST_MEMORY = 40e9
"""Bytes a second of host memory, for one rank's optimizer: two channels of DDR5, or a server's share for each GPU."""

HOST_NETWORK = 1e9
"""Bytes a second of a collective in host memory, by gloo: 0.2 s for 188 MB on 2 ranks of one machine were measured."""

ON_TENSOR_CORES = ("float16", "bfloat16", "tfloat32")


@dataclass(frozen=True)
class Times:
    """Milliseconds of a phase or of a step.

    Args:
        total_ms: from its begin to its end, what runs at the same time counted once.
        compute_ms: of kernels, on all streams: they share the GPU.
        launch_ms: of the CPU, which launches while the GPU computes.
        transfer_ms: of copies over the bus, overlapped or not.
        communication_ms: of collectives, overlapped or not.
        host_ms: of the optimizer on the CPU; nothing overlaps with it.
        exposed_ms: what copies, collectives and the host add to the time of computing and launching.
    """

    total_ms: float
    compute_ms: float
    launch_ms: float
    transfer_ms: float
    communication_ms: float
    host_ms: float
    exposed_ms: float

    @property
    def overlapped_ms(self) -> float:
        """What copies and collectives do not cost, since they run beside the computation and each other."""
        return self.transfer_ms + self.communication_ms + self.host_ms - self.exposed_ms


@dataclass(frozen=True)
class StepTime(Times):
    """Milliseconds of a step, and of each of its phases in the order in which they began."""

    phases: dict[str, Times]


def step_time(
    work: Sequence[Work], gpu: GPU, ranks: int, *, gpus_per_node: int = 8, network: float = NETWORK
) -> StepTime:
    """Estimate the time of a step: for ranking plans, not for promises.

    In a phase, what is on stream 0 runs one after the other. What is on another stream runs beside it, and is exposed
    where it takes longer; so is the CPU's launching. Copies in one direction share the bus, collectives the link,
    whatever their streams. Stream -1 is the host, which works when the GPU has finished the phase. Phases do not
    overlap. Every collective is over all ranks.

    Args:
        work: what one rank does in a step, as a trace lists it. Operations without flops and bytes (views) cost a
            launch only.
        gpu: of every rank.
        ranks: over all nodes.
        gpus_per_node: beyond so many ranks, collectives go over the network.
        network: bytes a second that leave a node, over all its adapters.

    Raises:
        RecipeError: unless ``ranks`` and ``gpus_per_node`` are integers of at least 1.
    """
    require_positive("ranks", ranks)
    require_positive("gpus_per_node", gpus_per_node)
    link = gpu.link if ranks <= gpus_per_node else min(gpu.link, network)
    by_phase: dict[str, list[Work]] = defaultdict(list)
    for item in work:
        by_phase[item.phase].append(item)
    phases = {phase: _phase(items, gpu, ranks, link) for phase, items in by_phase.items()}
    sums = {part.name: sum(getattr(times, part.name) for times in phases.values()) for part in fields(Times)}
    return StepTime(**sums, phases=phases)


def kernel_seconds(item: Work, gpu: GPU) -> float:
    """Seconds of one kernel by the roofline. A dtype that the GPU has no units for computes as fast as fp32."""
    if not item.flops and not item.bytes:
        return 0.0
    dtype = item.dtype
    if dtype == "float32" and "convolution" in item.op and "tfloat32" in gpu.flops:
        dtype = "tfloat32"  # torch's default for convolutions, though not for matrix products
    if dtype not in gpu.flops:
        dtype = "float32"
    achieved = TENSOR_CORES if dtype in ON_TENSOR_CORES else OTHER_CORES
    return KERNEL + max(item.flops / (gpu.flops[dtype] * achieved), item.bytes / (gpu.bandwidth * MEMORY))


def collective_seconds(item: Work, ranks: int, link: float) -> float:
    """Seconds of a collective of ``item.bytes`` (of the whole tensor) as a ring, at ``link`` bytes a second.

    An all-gather and a reduce-scatter send ``(ranks - 1) / ranks`` of the tensor from every rank, an all-reduce is one
    after the other (Patarasuk and Yuan, 2009). For small tensors NCCL takes trees, hence the logarithm.
    """
    if ranks == 1:
        return 0.0
    rounds = 2 if item.op == "all_reduce" else 1
    return HOP * math.log2(ranks) + rounds * (ranks - 1) / ranks * item.bytes / link


def _phase(items: Iterable[Work], gpu: GPU, ranks: int, link: float) -> Times:
    compute = host = transfer = communication = in_line = 0.0
    launches = 0
    beside: dict[tuple[str, int | str], float] = defaultdict(float)
    for item in items:
        if item.stream < 0:
            host += _host_seconds(item, ranks)
            continue
        launches += 1
        if item.kind == "compute":
            compute += kernel_seconds(item, gpu)
            continue
        if item.kind == "collective":
            seconds = collective_seconds(item, ranks, link)
            communication += seconds
        else:
            seconds = COPY + item.bytes / gpu.bus
            transfer += seconds
        if item.stream == 0:
            in_line += seconds
        else:
            beside["stream", item.stream] += seconds
            beside["link", item.kind] += seconds
    launch = launches * LAUNCH
    total = max(compute + in_line, launch, *beside.values()) + host
    seconds_of = (total, compute, launch, transfer, communication, host, total - max(compute, launch))
    return Times(*(1e3 * seconds for seconds in seconds_of))


def _host_seconds(item: Work, ranks: int) -> float:
    return collective_seconds(item, ranks, HOST_NETWORK) if item.kind == "collective" else item.bytes / HOST_MEMORY


# The time of a step on many devices: its operations in their order, each when its inputs and its place are free.
#
# One clock for the CPU, which launches; one for the GPU; one for each link and direction of the bus. What the
# strategies overlap follows from what waits for what:
#
# * DDP reduces a bucket when its gradients are there, beside the rest of that backward.
# * FSDP2 gathers the next block's weights while a block computes, one ahead (``wait_for_unshard`` of torch's
#   ``_fsdp_param_group.py``), and reduces a block's gradients beside the backward of the blocks before it.
# * Both wait for all reductions at the end of a backward.

Seconds = Callable[[Work], tuple[str, float]]
"""Which link a collective takes, and for how many seconds."""

TAKES_WEIGHTS = "split_with_sizes_copy"
"""The operation with which FSDP2 takes gathered weights over: it waits for their all-gather."""


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a step.

    Args:
        step_ms: from its begin to its end.
        compute_ms: without any collective: kernels, launches, copies, the optimizer.
        communication_ms: of all collectives, one after the other.
    """

    step_ms: float
    compute_ms: float
    communication_ms: float

    @property
    def exposed_ms(self) -> float:
        """What collectives add to the time of the rest, because nothing is left to overlap with."""
        return self.step_ms - self.compute_ms


def step_cost(trace: Trace, gpu: GPU, seconds: Seconds) -> StepCost:
    """The time of the last step of ``trace`` on ``gpu``; micro-steps that were not traced are like one in the middle.

    Args:
        trace: with the work of a step.
        gpu: of every rank.
        seconds: of a collective.
    """
    figures = [_figures(trace.work, gpu, seconds)]
    if trace.skipped_micro_steps:
        figures.append(_figures(one_more(trace), gpu, seconds))
    first, last = figures[0], figures[-1]
    return StepCost(*(1e3 * (a + trace.skipped_micro_steps * (b - a)) for a, b in zip(first, last, strict=True)))


def one_more(trace: Trace) -> list[Work]:
    """The work of a step with the micro-step in its middle done twice."""
    begin, end = trace.micro_steps[-3:-1]
    return trace.work[:end] + trace.work[begin:end] + trace.work[end:]


def _figures(work: Sequence[Work], gpu: GPU, seconds: Seconds) -> tuple[float, float, float]:
    alone = Timeline(gpu, lambda item: (seconds(item)[0], 0.0)).run(work)
    together = Timeline(gpu, seconds).run(work)
    return together, alone, sum(seconds(item)[1] for item in work if item.kind == "collective")


class Timeline:
    """The clocks of one rank.

    Args:
        gpu: that computes.
        seconds: of a collective.
    """

    def __init__(self, gpu: GPU, seconds: Seconds) -> None:
        self.gpu, self.seconds = gpu, seconds
        self.launched = self.computed = self.reduced = 0.0
        self.free: dict[str, float] = defaultdict(float)
        self.gathered: deque[float] = deque()
        self.may_gather = self.took_weights = 0.0
        self.phase = ""

    def run(self, work: Sequence[Work]) -> float:
        """Seconds until all of ``work`` is done."""
        for item in work:
            if item.phase != self.phase:
                if self.phase == "backward":
                    self.computed = self._all_done()
                self.phase = item.phase
            self._do(item)
        return self._all_done()

    def _all_done(self) -> float:
        return max(self.launched, self.computed, *self.free.values(), 0.0)

    def _do(self, item: Work) -> None:
        if item.stream < 0:  # the host, when everything that it needs has arrived
            done = self._all_done() + (self.seconds(item)[1] if item.kind == "collective" else item.bytes / HOST_MEMORY)
            self.launched = self.computed = done
            return
        self.launched += LAUNCH
        if item.kind == "compute":
            self._compute(item)
        elif item.kind == "collective":
            self._communicate(item)
        else:
            self._copy(item)

    def _compute(self, item: Work) -> None:
        begin = max(self.launched, self.computed)
        takes = item.op == TAKES_WEIGHTS and bool(self.gathered)
        if takes:
            begin = max(begin, self.gathered.popleft())
        self.computed = begin + kernel_seconds(item, self.gpu)
        if takes:
            # In forward an all-gather waits until the weights before these are taken, in backward for these.
            self.may_gather = self.took_weights if item.phase == "forward" else self.computed
            self.took_weights = self.computed

    def _communicate(self, item: Work) -> None:
        link, seconds = self.seconds(item)
        begin = max(self.launched, self.free[link])
        if item.op == "all_gather" and item.stream:
            self.free[link] = max(begin, self.may_gather) + seconds
            self.gathered.append(self.free[link])
            return
        end = max(begin, self.computed, self.reduced) + seconds
        self.free[link] = end
        if item.phase == "backward":
            self.reduced = end
        else:  # such as the norm of the gradients: the next operation needs it
            self.computed = end

    def _copy(self, item: Work) -> None:
        needs = self.computed if item.kind == "to_host" or not item.stream else 0.0
        self.free[item.kind] = max(self.launched, self.free[item.kind], needs) + COPY + item.bytes / self.gpu.bus
        if not item.stream:
            self.computed = self.free[item.kind]
