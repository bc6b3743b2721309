"""The time of a step on many devices: its operations in their order, each when its inputs and its place are free.

One clock for the CPU, which launches; one for the GPU; one for each link and direction of the bus. What the strategies
overlap follows from what waits for what:

* DDP reduces a bucket when its gradients are there, beside the rest of that backward.
* FSDP2 gathers the next block's weights while a block computes, one ahead (``wait_for_unshard`` of torch's
  ``_fsdp_param_group.py``), and reduces a block's gradients beside the backward of the blocks before it.
* Both wait for all reductions at the end of a backward.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.planner.cost import COPY, HOST_MEMORY, LAUNCH, kernel_seconds
from trainer.planner.events import Trace, Work
from trainer.planner.gpus import GPU

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
