"""Small programs for a GPU, and what the detector must say of each: the rules of CUDA and of torch's allocators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from races.configurations import TARGET, install
from races.detector import Detector
from races.watched import WatchedStream
from torch import Tensor

from trainer.planner import traced_run


def on_device(count: int = 8) -> Tensor:
    """A new tensor, filled on the current stream."""
    return torch.ones(count, device="cuda")


def beside(after: Any = None) -> Any:
    """The context of a new stream, that has waited for another one if told to."""
    stream = torch.cuda.Stream()
    if after is not None:
        stream.wait_stream(after)
    return torch.cuda.stream(stream)


def now() -> Any:
    """The current stream."""
    return torch.cuda.current_stream()


def read_on_another_stream() -> None:
    tensor = on_device()
    with beside():
        tensor + 1


def read_after_waiting_for_the_stream() -> None:
    tensor = on_device()
    with beside(after=now()):
        tensor + 1


def read_after_an_event() -> None:
    tensor = on_device()
    event = now().record_event()
    with beside():
        event.wait()
        tensor + 1


def read_after_an_earlier_event() -> None:
    event = now().record_event()
    tensor = on_device()
    with beside():
        now().wait_event(event)
        tensor + 1


def read_twice_at_once() -> None:
    tensor = on_device()
    with beside(after=now()):
        tensor + 1
    tensor + 1


def halves_written_at_once() -> None:
    tensor = on_device()
    with beside(after=now()):
        tensor[:4].zero_()
    tensor[4:].zero_()


def overlapping_parts_written_at_once() -> None:
    tensor = on_device()
    with beside(after=now()):
        tensor[:5].zero_()
    tensor[4:].zero_()


def freed_while_in_use() -> None:
    tensor = on_device()
    with beside(after=now()):
        tensor + 1
    del tensor
    on_device()


def freed_after_the_use() -> None:
    tensor = on_device()
    with beside(after=now()):
        tensor + 1
        used = now().record_event()
    now().wait_event(used)
    del tensor
    on_device()


def freed_while_in_use_but_recorded() -> None:
    tensor = on_device()
    with beside(after=now()):
        tensor + 1
        tensor.record_stream(now())
    del tensor
    on_device()


def made_on_the_stream_that_fills_it() -> None:
    host = torch.ones(8, pin_memory=True)
    with beside(after=now()):
        tensor = host.to("cuda", non_blocking=True)
        arrived = now().record_event()
    now().wait_event(arrived)
    tensor + 1


def host_reads_before_it_has_arrived() -> None:
    host = torch.empty(8, pin_memory=True)
    host.copy_(on_device(), non_blocking=True)
    host + 1


def host_reads_after_waiting() -> None:
    host = torch.empty(8, pin_memory=True)
    host.copy_(on_device(), non_blocking=True)
    now().synchronize()
    host + 1


def host_writes_what_has_left_pageable_memory() -> None:
    host = torch.ones(8)
    device = host.to("cuda")
    host.copy_(device)
    host.zero_()


def host_writes_what_is_leaving() -> None:
    host = torch.ones(8, pin_memory=True)
    on_device().copy_(host, non_blocking=True)
    host.zero_()


def copied_to_pageable_memory() -> None:
    torch.empty(8).copy_(on_device(), non_blocking=True)


def copied_to_other_strides() -> None:
    torch.empty(2, 4, pin_memory=True).t().copy_(on_device().view(4, 2), non_blocking=True)


def converted_on_the_way_to_the_host() -> None:
    torch.empty(8, pin_memory=True, dtype=torch.bfloat16).copy_(on_device(), non_blocking=True)


def converted_on_the_way_from_the_host() -> None:
    on_device().copy_(torch.ones(8, pin_memory=True, dtype=torch.bfloat16), non_blocking=True)


PROGRAMS: dict[Callable[[], None], str] = {
    read_on_another_stream: "race",
    read_after_waiting_for_the_stream: "",
    read_after_an_event: "",
    read_after_an_earlier_event: "race",
    read_twice_at_once: "",
    halves_written_at_once: "",
    overlapping_parts_written_at_once: "race",
    freed_while_in_use: "reused in use",
    freed_after_the_use: "",
    freed_while_in_use_but_recorded: "",
    made_on_the_stream_that_fills_it: "",
    host_reads_before_it_has_arrived: "race",
    host_reads_after_waiting: "",
    host_writes_what_has_left_pageable_memory: "",
    host_writes_what_is_leaving: "race",
    copied_to_pageable_memory: "pageable copy",
    copied_to_other_strides: "pageable copy",
    converted_on_the_way_to_the_host: "",
    converted_on_the_way_from_the_host: "pageable copy",
}


def verdicts() -> dict[str, list[str]]:
    """The kinds of what is found in each program. It changes torch for the rest of the process."""
    found = {}
    install(Detector())
    with traced_run.tracing(TARGET) as tracer:
        for program in PROGRAMS:
            detector = Detector()
            type(tracer).detector = WatchedStream.detector = detector  # type: ignore[attr-defined]
            program()
            kinds = {finding.split(":")[0].rsplit(" in ", 1)[0] for finding in detector.findings}
            found[program.__name__] = sorted(kinds)
    return found
