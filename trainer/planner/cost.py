"""How long a step takes: an estimate from what it does, to rank plans by.

An operation takes its arithmetic and its memory traffic, one after the other; copies and collectives take what their
link allows. The roofline model (Williams, Waterman and Patterson, 2009) takes the longer of both: that is a bound. In a
real product the first tiles are read and the last are written while nothing computes, and the sum is what square
products of 1,024 and 2,048 rows were measured to take (``tests/planner/test_cost.py``). So a product reaches
``1 / (1 + ridge / intensity)`` of the card's rate, where the ridge is that rate over the bandwidth.

No figure here was fitted on a training step. How far off steps are is in docs/planner.md.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.planner.events import Trace, Work
from trainer.planner.gpus import GPU

# Of the data sheet's bandwidth, in large copies and elementwise kernels: the median of 14 measurements of torch, 0.73 on
# an A100 to 0.96 on a 3090 (github.com/chsasank/device-benchmarks, github.com/mli/transformers-benchmarks).
MEMORY = 0.83
# What attention kernels reach of the rate of products: FlashAttention-2 50 to 73 % of an A100's peak, whose products
# reach 83 % (Dao, 2023), and cuDNN's about 55 % of an H100's (Shah et al., 2024).
ATTENTION = 0.72
KERNEL = 4e-6  # seconds to start, fill and drain a kernel. Assumed; 2 to 10 are seen, and see test_cost.py
# Seconds of the CPU for an operation in eager mode, autograd and Python included. Assumed: ``a * 1.2`` alone took 2.7,
# 4.3 and 7.3 on three machines (github.com/mli/transformers-benchmarks, also issue 4), a layer's operations take 5 to 25.
LAUNCH = 8e-6
COPY = 10e-6  # seconds to start a copy over the bus. Assumed; 5 to 20
# Bytes a second of one rank's optimizer on the host. Assumed: Adam on a billion weights takes 1.39 s in plain torch and
# 0.22 s in DeepSpeed's kernel on two large sockets (ZeRO-Offload, Ren et al., 2021, table 4), which is 20 to 127 GB/s.
HOST_MEMORY = 40e9
HOST_NETWORK = 1e9  # bytes a second of gloo in host memory: 0.2 s for 188 MB on 2 ranks of one machine were measured
TAKES_WEIGHTS = "split_with_sizes_copy"
"""The operation with which FSDP2 takes gathered weights over: it waits for their all-gather."""

Seconds = Callable[[Work], tuple[str, float]]
"""Which link a collective takes, and for how many seconds."""


def kernel_seconds(item: Work, gpu: GPU) -> float:
    """Seconds of one kernel: its arithmetic at the rate of products, and its traffic."""
    if not item.flops and not item.bytes:
        return 0.0
    rate = gpu.product_rate(item.dtype) * (ATTENTION if "attention" in item.op else 1.0)
    return KERNEL + item.flops / rate + item.bytes / (gpu.bandwidth * MEMORY)


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a step; what a kind of work takes is one after the other, overlapped or not."""

    step_ms: float  # from its begin to its end, what runs at the same time counted once
    alone_ms: float  # the same without any collective
    update_ms: float  # of ``step_ms``, what comes after the last backward
    compute_ms: float  # of all kernels
    launch_ms: float  # of the CPU, which launches while the GPU computes
    transfer_ms: float  # of copies over the bus
    communication_ms: float  # of collectives
    host_ms: float  # of the optimizer on the CPU; nothing overlaps with it

    @property
    def exposed_ms(self) -> float:
        """What collectives add to the time of the rest, because nothing is left to overlap with."""
        return self.step_ms - self.alone_ms


def step_cost(trace: Trace, gpu: GPU, seconds: Seconds) -> StepCost:
    """The time of the last step of ``trace``; micro-steps that were not traced are like the one in the middle."""
    figures = _figures(trace.work, gpu, seconds)
    if more := trace.skipped_micro_steps:
        figures = [a + more * (b - a) for a, b in zip(figures, _figures(one_more(trace), gpu, seconds), strict=True)]
    return StepCost(*(1e3 * figure for figure in figures))


def one_more(trace: Trace) -> list[Work]:
    """The work of a step with the micro-step in its middle done twice."""
    begin, end = trace.micro_steps[-3:-1]
    return trace.work[:end] + trace.work[begin:end] + trace.work[end:]


def _figures(work: Sequence[Work], gpu: GPU, seconds: Seconds) -> list[float]:
    """In seconds, in the order of :class:`StepCost`."""
    clocks = Clocks(gpu, seconds)
    step = alone = clocks.run(work)
    if clocks.busy["communication"]:
        alone = Clocks(gpu, lambda item: (seconds(item)[0], 0.0)).run(work)
    kinds = ("compute", "launch", "transfer", "communication", "host")
    return [step, alone, step - clocks.began.get("step", step), *(clocks.busy[kind] for kind in kinds)]


class Clocks:
    """The clocks of one rank: of the CPU, which launches; of the GPU; of each link and each direction of the bus.

    Operations come in their order, each when its inputs and its place are free. What the strategies overlap follows:

    * DDP reduces a bucket when its gradients are there, beside the rest of that backward.
    * FSDP2 gathers the next block's weights while a block computes, one ahead (``wait_for_unshard`` of torch's
      ``_fsdp_param_group.py``), and reduces a block's gradients beside the backward of the blocks before it.
    * Both wait for all reductions at the end of a backward. The host updates when all that it needs has arrived.
    """

    def __init__(self, gpu: GPU, seconds: Seconds) -> None:
        self.gpu, self.seconds = gpu, seconds
        self.launched = self.computed = self.reduced = self.may_gather = self.took_weights = 0.0
        self.free: dict[str, float] = defaultdict(float)
        self.busy: dict[str, float] = defaultdict(float)
        self.gathered: deque[float] = deque()
        self.phase = ""
        self.began: dict[str, float] = {}

    def run(self, work: Sequence[Work]) -> float:
        """Seconds until all of ``work`` is done."""
        for item in work:
            if item.phase != self.phase:
                # A backward waits for its reductions, a forward for the weights that were copied for it.
                self.computed = max(self.computed, self.free["to_device"])
                if self.phase == "backward":
                    self.computed = self._all_done()
                self.phase = item.phase
                self.began[item.phase] = self._all_done()
            self._do(item)
        return self._all_done()

    def _all_done(self) -> float:
        return max(self.launched, self.computed, *self.free.values(), 0.0)

    def _do(self, item: Work) -> None:
        if item.stream < 0:  # the host, when everything that it needs has arrived
            reduces = item.kind == "collective"
            seconds = self.seconds(item)[1] if reduces else item.bytes / HOST_MEMORY
            self.busy["communication" if reduces else "host"] += seconds
            self.launched = self.computed = self._all_done() + seconds
            return
        self.busy["launch"] += LAUNCH
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
        seconds = kernel_seconds(item, self.gpu)
        self.busy["compute"] += seconds
        self.computed = begin + seconds
        if takes:
            # In forward an all-gather waits until the weights before these are taken, in backward for these.
            self.may_gather = self.took_weights if item.phase == "forward" else self.computed
            self.took_weights = self.computed

    def _communicate(self, item: Work) -> None:
        link, seconds = self.seconds(item)
        self.busy["communication"] += seconds
        begin = max(self.launched, self.free[link])
        if item.op == "all_gather" and item.stream:
            self.free[link] = max(begin, self.may_gather) + seconds
            self.gathered.append(self.free[link])
            return
        self.free[link] = end = max(begin, self.computed, self.reduced) + seconds
        if item.phase == "backward":
            self.reduced = end
        else:  # such as the norm of the gradients: the next operation needs it
            self.computed = end

    def _copy(self, item: Work) -> None:
        seconds = COPY + item.bytes / self.gpu.bus
        self.busy["transfer"] += seconds
        needs = self.computed if item.kind == "to_host" or not item.stream else 0.0
        self.free[item.kind] = max(self.launched, self.free[item.kind], needs) + seconds
        if not item.stream:
            self.computed = self.free[item.kind]
