"""Leaves a process group in which one rank failed, and creates a new one in the same processes.

A gloo group closes its connections only when nothing refers to it any more. Any remaining reference keeps the other
ranks waiting until they are ended with a message: a wrapped module, a device mesh, or the default arguments of
``torch.distributed.nn`` and of FSDP's ``sharded_grad_scaler`` if they are first imported after the group was created.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from lightning_fabric import Fabric
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from trainer.memory.plan import Plan
from trainer.recipe import Recipe
from trainer.system.error_reports import print_error
from trainer.system.text import escaped

REQUEST_TIMEOUT = 1.0
"""How long a rank whose collective broke waits for another rank's call for a new group, which precedes the closing of
its connections. It must be short: Fabric kills the first rank of those that it started within five seconds after
another has failed, even if the summary is not written."""

POLL_INTERVAL = 0.5
MAX_REASON_CHARS = 1000  # characters of a reason

LEAVE_TIMEOUT = 300.0
"""How long a called rank may take to leave its collective and save its state before it is ended."""


def can_recover(recipe: Recipe, plan: Plan) -> bool:
    """Return whether a run continues after out of memory; never a deterministic one: a new cut changes rounding."""
    return recipe.run.recover and not plan.deterministic


def disable_nccl_error_handling() -> None:
    """Make torch ignore NCCL errors; call it before the process group is created. Otherwise torch ends the other ranks
    when one leaves. Torchrun sets the variable to 1 for all ranks, so it does not show what the user wants."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


class ProcessGroupRecovery:
    """Calls all ranks of a launched ``fabric`` out of their collectives.

    A rank that fails inside a collective cannot finish it, and the others would wait until the process group's timeout.
    It writes a call to the launcher's key-value store and closes its connections. With gloo, the other ranks'
    collectives then fail at once. NCCL does not notice a missing peer, so on GPUs a thread watches the store and aborts
    this rank's collectives when it is called.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.store = distributed_c10d._get_default_store()
        self.own_store = self.store.clone()  # a separate connection for the thread
        # A script may train several times with one launcher store. A run must not read an earlier run's calls.
        self.run = self.own_store.add(f"regroupings/{fabric.global_rank}", 1)
        self.meetings, self.lock, self.done = 0, threading.Lock(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def request(self, why: str) -> None:
        """Call all ranks to leave the group, for the reason ``why``."""
        self.own_store.set(self._key(self.meetings), why)

    def requested_reason(self) -> str | None:
        """Return why this rank must leave; ``None`` if no rank calls in time, for example because one has died."""
        until = time.monotonic() + REQUEST_TIMEOUT
        while time.monotonic() < until:
            if self.own_store.check([self._key(self.meetings)]):
                return self._read_reason(self.meetings)
            time.sleep(POLL_INTERVAL / 5)
        return None

    def rejoin(self) -> None:
        """Leave the group and join a new one, which starts when all ranks have joined."""
        fabric = self.fabric
        device = fabric.device if fabric.device.type == "cuda" else None
        if device is not None:
            time.sleep(POLL_INTERVAL)  # the others must read the call before connections break
        with self.lock:  # from here on, the thread must not abort: it would find the next group
            self._abort()
            self.meetings += 1
        _forget_groups_of_meshes()
        with suppress(Exception):  # the group is broken, so any error is expected
            dist.destroy_process_group()
        backend, timeout = (getattr(fabric.strategy, name, None) for name in ("process_group_backend", "_timeout"))
        ranks: dict[str, Any] = {"rank": fabric.global_rank, "world_size": fabric.world_size, "device_id": device}
        store = dist.PrefixStore(f"meeting{self.meetings}", self.store)
        dist.init_process_group(backend, store=store, timeout=timeout, **ranks)

    def close(self) -> None:
        self.done.set()

    def _key(self, meeting: int) -> str:
        return f"run{self.run}/leave/{meeting}"

    def _read_reason(self, meeting: int) -> str:
        return escaped(self.own_store.get(self._key(meeting)).decode(errors="replace"))[:MAX_REASON_CHARS]

    def _watch(self) -> None:
        """Abort this rank's collectives when it is called; runs in a thread until the run ends."""
        meeting = 0
        while not self.done.wait(POLL_INTERVAL):
            try:
                called = meeting <= self.meetings and self.own_store.check([self._key(meeting)])
            except RuntimeError:  # the launcher and its store ended before this process
                return
            if not called:
                continue
            with self.lock:
                if self.meetings == meeting:
                    self._abort()
            self._require_leaving(meeting)
            meeting += 1

    def _abort(self) -> None:
        """Abort this rank's collectives on a GPU, for which leaving would wait; does nothing the second time."""
        if self.fabric.device.type == "cuda":
            with suppress(Exception):
                distributed_c10d._abort_process_group()

    def _require_leaving(self, meeting: int) -> None:
        """End the process if it does not leave a broken collective in time: no run may hang."""
        until = time.monotonic() + LEAVE_TIMEOUT
        while self.meetings <= meeting and not self.done.is_set():
            if time.monotonic() > until:
                which = f"rank {self.fabric.global_rank} could not leave a collective that another rank has left"
                fix = "start the run again with a smaller memory.micro_batch_size"
                print_error(f"{which} ({self._read_reason(meeting)}): {fix}")
                os._exit(1)
            time.sleep(POLL_INTERVAL)


def _forget_groups_of_meshes() -> None:
    """Clear the groups of all device meshes: DTensor's caches keep meshes, and so the old group, alive."""
    for mesh in [one for one in gc.get_objects() if type(one) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()
