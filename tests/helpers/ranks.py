"""Runs a function on n gloo ranks: a pool of processes that lives as long as the tests of a file.

Calling a function on them costs milliseconds, and hypothesis can draw as many cases as it likes.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from helpers import LONG
from helpers.warm import forks

PICTURES = (
    *("trainer.run.directory.plot_curves", "trainer.run.directory.plot_memory"),
    "trainer.report.mistakes.plot_confusion",
)
MOST_CALLS = 60
"""Of a pool: with every mesh that a call makes there are more threads of gloo, which never end."""


class RankPool:
    """``world_size`` processes in one gloo group."""

    def __init__(self, world_size: int) -> None:
        port = free_port()
        self.connections, self.processes, self.calls = [], [], 0
        for rank in range(world_size):
            ours, theirs = forks.Pipe()
            environment = dict(os.environ) | torchrun_variables(rank, world_size, port)
            process = forks.Process(target=_serve, args=(theirs, environment), daemon=True)
            process.start()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = LONG) -> list[Any]:
        """Call the module-level ``function`` on every rank; return its results by rank, or raise the first error."""
        self.calls += 1
        for connection in self.connections:
            connection.send((function, args))
        replies = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(seconds):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {seconds} s")
            replies.append(connection.recv())
        for rank, (ok, value) in enumerate(replies):
            if not ok:
                raise AssertionError(f"rank {rank}:\n{value}")
        return [value for _, value in replies]

    def is_spent(self) -> bool:
        """Whether a new pool should take its place."""
        return self.calls >= MOST_CALLS or not all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()


_POOLS: dict[int, RankPool] = {}


def rank_pool(world_size: int) -> RankPool:
    """The pool of ``world_size`` ranks of this process; a spent one is replaced."""
    if world_size not in _POOLS or _POOLS[world_size].is_spent():
        end_rank_pools(world_size)
        _POOLS[world_size] = RankPool(world_size)
    return _POOLS[world_size]


def end_rank_pools(*world_sizes: int) -> None:
    """End pools, by default all."""
    for world_size in world_sizes or tuple(_POOLS):
        if world_size in _POOLS:
            _POOLS.pop(world_size).close()


def torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank of this machine: Fabric then starts no processes of its own."""
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "GROUP_WORLD_SIZE": 1}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port} | sizes
    texts = {"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1"}
    return {name: str(number) for name, number in numbers.items()} | texts


def _serve(connection: Any, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import torch

    # As in a run: what torch imports when there is a group may refer to it for ever (see
    # trainer.faults.process_group_recovery).
    import trainer.api  # noqa: F401

    for name in PICTURES:
        module, function = name.rsplit(".", 1)
        setattr(sys.modules[module], function, lambda *_: None)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            sys.stdout.flush()
            os._exit(0)  # gloo aborts at random when it is taken down in order
        try:
            connection.send((True, function(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def free_port() -> int:
    """Of this machine: one that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
