"""Ports and process group: as many ranks as were asked for, started and added up, in processes of their own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainer.doctor.finding import Finding, fail, ok
from trainer.doctor.subject import Subject
from trainer.launching.loopback import ADDRESS, keep_to_loopback, loopback_store
from trainer.planner.children import Child
from trainer.planner.ranks import forget_process_group

SECONDS = 20.0
FIX = "check firewall, hostname and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says more"


def process_group(subject: Subject) -> Iterator[Finding]:
    """Start the ranks of this machine and let them add up who they are, for no longer than ``SECONDS``."""
    check, size = "process group", subject.world.devices
    try:
        listener = socket.create_server((ADDRESS, 0))  # which the first rank inherits
    except OSError as error:
        yield fail(check, f"no port can be opened on {ADDRESS}: {error}", "check the network of this container")
        return
    on_gpu = subject.world.accelerator == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    began = time.perf_counter()
    jobs = [partial(_add_up, backend, rank, size, listener) for rank in range(size)]
    ranks = [Child(job, sees_gpu=on_gpu, anew=on_gpu) for job in jobs]
    listener.close()
    problems = []
    for rank, child in enumerate(ranks):
        left = SECONDS - (time.perf_counter() - began)
        problem = _problem(child, max(0.0, left))
        if problem:
            problems.append(f"rank {rank}: {problem}")
    if problems:
        yield fail(check, f"{backend}, {size} rank(s): {problems[0]}", FIX)
    else:
        yield ok(check, f"{backend}, {size} rank(s) met and added up in {time.perf_counter() - began:.1f} s")


def _problem(child: Child, seconds: float) -> str | None:
    if not child.wait(seconds):
        child.kill()
        return f"no answer within {SECONDS:g} s"
    found: Any = child.result()
    return str(found) if isinstance(found, Exception) else None


def _add_up(backend: str, rank: int, size: int, listener: socket.socket) -> bool:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    forget_process_group()
    keep_to_loopback()
    port = listener.getsockname()[1]
    if rank == 0:
        store = loopback_store(listener, SECONDS)
    else:
        listener.close()
        store = dist.TCPStore(ADDRESS, port, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SECONDS),
    )
    value = torch.tensor(float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    if value.item() != size * (size + 1) / 2:
        raise RuntimeError(f"the sum of the ranks came out as {value.item():g}")
    dist.destroy_process_group()
    return True
