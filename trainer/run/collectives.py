"""Agreements of the ranks: sums, values as JSON (torch's collectives of objects unpickle them), one run directory.

Before every step the ranks sum the weights of the batch on the host. The votes of each rank (it was asked to stop, a
checkpoint is due) are part of the same sum, so all ranks know them at the same step, without another collective.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric
from torch import Tensor

from trainer.errors import RecipeError, RunError, require
from trainer.recipe import Memory
from trainer.report.mistakes import of_all_ranks

T = TypeVar("T")
Sum = Callable[[list[float]], list[float]]


class VotedSum:
    """Sums floats over the ranks, together with the votes of this rank."""

    def __init__(self, total: Sum) -> None:
        self.total = total  # ``list`` while this rank is in no process group
        self.votes: Callable[[], Sequence[float]] = tuple  # all ranks must return the same number of votes
        self.agreed: list[float] = []  # sums of the votes in the last call

    def __call__(self, values: list[float]) -> list[float]:
        totals = self.total([*values, *self.votes()])
        self.agreed = totals[len(values) :]
        return totals[: len(values)]


def make_host_sum(fabric: Fabric) -> Sum:
    """Return a sum over the ranks on the host, through gloo, so that no rank waits for its GPU. A collective."""
    needs_gloo = fabric.world_size > 1 and fabric.device.type == "cuda"
    return make_sum(fabric, torch.device("cpu"), torch.distributed.new_group(backend="gloo") if needs_gloo else None)


def make_sum(fabric: Fabric, device: torch.device, group: Any = None) -> Sum:
    """Return a sum over the ranks on ``device``; without ``group``, in the default group at the time of the call."""

    def total(values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(tensor, group=group)
        return tensor.tolist()

    return total if fabric.world_size > 1 else list


def sum_over_data_parallel(memory: Memory, rank: int, total: Sum) -> Sum:
    """Return ``total`` over the shares of a batch: of several tensor-parallel ranks, only the first counts.

    These ranks must have read the same samples, because they compute parts of the same activations. If they have not
    (for example, only one could read a file), all ranks raise an error before they compute.
    """
    copies = memory.tensor_parallel

    def once(values: list[float]) -> list[float]:
        found = total([*(value * (rank % copies == 0) for value in values), *values])
        sums, everywhere = found[: len(values)], found[len(values) :]
        if not all(math.isclose(a * copies, b, rel_tol=1e-9) for a, b in zip(sums, everywhere, strict=True)):
            why = "ranks that share every block have read different samples, or could not read the same ones"
            fix = "look for a disk that only some of them reach, then use run.resume auto"
            raise RunError(f"memory.tensor_parallel={copies}: {why}: {fix}")
        return sums

    return once if copies > 1 else total


def run_on_rank_zero(fabric: Fabric, decide: Callable[[], T]) -> T:
    """Run ``decide`` on the first rank; return its result as JSON, or raise its RecipeError, on all ranks."""
    outcome: tuple[Any, str | None] = (None, None)
    if fabric.global_rank == 0:
        try:
            outcome = decide(), None
        except RecipeError as error:
            outcome = None, str(error)
    value, refusal = broadcast_json(fabric, outcome)
    require(refusal is None, refusal)
    return value


def broadcast_json(fabric: Fabric, value: Any) -> Any:
    """Return the value of the first rank as JSON, because torch's broadcast of objects unpickles them."""
    return all_gather_json(fabric, value)[0]


def all_gather_json(fabric: Fabric, value: Any) -> list[Any]:
    """Gather the values of all ranks as JSON, in the order of the ranks."""
    if fabric.world_size == 1:
        return [value]
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(fabric.device)
    sizes = torch.zeros(fabric.world_size, dtype=torch.long, device=fabric.device)
    sizes[fabric.global_rank] = len(content)
    torch.distributed.all_reduce(sizes)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=fabric.device)
    padded[: len(content)] = content
    found = zip(of_all_ranks(padded), sizes.tolist(), strict=True)
    return [json.loads(bytes(one[:size].tolist())) for one, size in found]


def gather_rows(fabric: Fabric, rows: Tensor | None) -> Tensor | None:
    """Concatenate the rows of all ranks in host memory, in the order of the ranks. A collective. A rank may have none.
    The result is ``None`` on all ranks except the first, and if no rank has rows."""
    if fabric.world_size == 1:
        return rows
    pieces = []
    own = None if rows is None else [str(rows.dtype).removeprefix("torch."), list(rows.shape)]
    for rank, kind in enumerate(all_gather_json(fabric, own)):
        if kind is None:
            continue
        if rank == fabric.global_rank and rows is not None:
            piece = rows.to(fabric.device).contiguous()
        else:
            piece = torch.empty(kind[1], dtype=getattr(torch, kind[0]), device=fabric.device)
        torch.distributed.broadcast(piece, rank)
        if fabric.global_rank == 0:
            pieces.append(piece.cpu())
    return torch.cat(pieces) if pieces else None


# Check before training, not when the first checkpoint fails, that all machines see the same run directory.

PREFIX = ".shared-"
PROBE_TIMEOUT = 10.0  # how long a file may take to appear on another machine
POLL_INTERVAL = 0.2


def require_shared_filesystem(fabric: Fabric, run_dir: Path) -> None:
    """Check that all machines share ``run_dir``. A collective.

    The first rank writes a file, which one rank of every other machine answers with another. Raise RecipeError on all
    ranks if a machine sees another directory or cannot write to it.
    """
    on_other_machine = fabric.local_rank == 0 and fabric.global_rank != 0
    if not any(all_gather_json(fabric, on_other_machine)):
        return
    token, here = run_on_rank_zero(fabric, partial(_leave, run_dir))
    problems = all_gather_json(fabric, _answer(run_dir, token) if on_other_machine else None)
    if fabric.global_rank == 0:
        for path in run_dir.glob(f"{token}*"):
            path.unlink(missing_ok=True)
    found = "; ".join(filter(None, problems))
    fix = "choose a directory on a file system that all machines share"
    require(not found, f"run.dir={run_dir} is not one directory for all machines: {found}; {here} created it: {fix}")


def _leave(run_dir: Path) -> tuple[str, str]:
    token = PREFIX + secrets.token_hex(8)
    problem = _touch(run_dir / token)
    require(problem is None, f"run.dir={run_dir} cannot be written to ({problem}): choose another directory")
    return token, socket.gethostname()


def _answer(run_dir: Path, token: str) -> str | None:
    here, until = socket.gethostname(), time.monotonic() + PROBE_TIMEOUT
    while not _is_seen(run_dir, token):
        if time.monotonic() > until:
            return f"{here} does not see what the first rank wrote there"
        time.sleep(POLL_INTERVAL)
    problem = _touch(run_dir / f"{token}-{here}")
    return f"{here} cannot write there ({problem})" if problem else None


def _touch(path: Path) -> str | None:
    try:
        path.touch()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _is_seen(run_dir: Path, token: str) -> bool:
    """List the directory, because NFS then asks its server; it may cache a missing name for 30 s."""
    with suppress(OSError):
        return token in os.listdir(run_dir)
    with suppress(OSError):
        os.listdir(run_dir.parent)
    return False
