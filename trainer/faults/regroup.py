"""Leave a process group in which one rank could not go on, and meet again in a new one, in the same processes.

A gloo group closes its connections when nothing refers to it any more, and has no other way to. Whatever keeps a
reference (a wrapped module, a device mesh, the default arguments of ``torch.distributed.nn`` and of FSDP's
``sharded_grad_scaler`` if those are first imported when the group is there) keeps the other ranks waiting; they are
then ended with a message.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import suppress

import torch.distributed as dist
from lightning_fabric import Fabric
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from trainer.memory.plan import Plan
from trainer.recipe import Recipe
from trainer.system.reports import say
from trainer.system.text import escaped

SECONDS_TO_HEAR = 1.0
"""How long a rank whose collective broke waits to hear that another one called for a new group, which that does before
it closes its connections. It must be short: where Fabric has started the ranks, it kills the first one up to five
seconds after another has failed, summary written or not."""

SECONDS_BETWEEN_LOOKS = 0.5
LONGEST = 1000  # characters of a reason

SECONDS_TO_LEAVE = 300.0
"""How long a rank that was called may take before it is ended: to come out of its collective and to keep its state."""


def recovers(recipe: Recipe, plan: Plan) -> bool:
    """Whether a run goes on after an out of memory; not one that is to be compared, as other cuts have other bits."""
    return recipe.run.recover and not plan.deterministic


def keep_ranks_alive() -> None:
    """Have torch leave the errors of NCCL alone; called before there is a group.

    When one rank has left, the others' connections break, and torch would end their processes before they hear that
    they are called. Torchrun sets this to 1 for its ranks, so that nobody's wish can be told from it. What hangs is
    ended by the watchdog.
    """
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


class Regrouping:
    """Calls all ranks of a launched ``fabric`` out of whatever they do together.

    A rank that fails inside a collective cannot finish it, and the others would wait for it until the process group's
    timeout. It says so in the launcher's key-value store, which needs nobody's help, and closes its connections: over
    gloo the others' collectives then end with an error at once. NCCL does not notice a peer that has gone: on GPUs a
    thread that watches the store aborts this rank's part when it is called.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.store = distributed_c10d._get_default_store()
        self.own_store = self.store.clone()  # a connection of its own, for the thread
        # A script may train several times over one launcher's store: what one run called, no later one shall hear.
        self.run = self.own_store.add(f"regroupings/{fabric.global_rank}", 1)
        self.meetings = 0
        self.lock = threading.Lock()
        self.done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def call(self, why: str) -> None:
        """Tell all ranks to leave."""
        self.own_store.set(self._key(self.meetings), why)

    def called(self) -> str | None:
        """Why this rank is to leave; ``None`` when nobody says so within seconds, as when a rank has died."""
        until = time.monotonic() + SECONDS_TO_HEAR
        while time.monotonic() < until:
            if self.own_store.check([self._key(self.meetings)]):
                return self._said(self.meetings)
            time.sleep(SECONDS_BETWEEN_LOOKS / 5)
        return None

    def meet(self) -> None:
        """Leave the group and enter a new one, which begins when all ranks have come."""
        fabric = self.fabric
        device = fabric.device if fabric.device.type == "cuda" else None
        if device is not None:
            time.sleep(SECONDS_BETWEEN_LOOKS)  # the others hear the call before they see connections break
        with self.lock:  # from here on, the thread must not abort: the next group would be the one that it finds
            self._abort()
            self.meetings += 1
        _forget_groups_of_meshes()
        with suppress(Exception):  # it is broken: whatever it says of that
            dist.destroy_process_group()
        dist.init_process_group(
            getattr(fabric.strategy, "process_group_backend", None),
            store=dist.PrefixStore(f"meeting{self.meetings}", self.store),
            rank=fabric.global_rank,
            world_size=fabric.world_size,
            timeout=getattr(fabric.strategy, "_timeout", None),
            device_id=device,
        )

    def close(self) -> None:
        """Stop listening."""
        self.done.set()

    def _key(self, meeting: int) -> str:
        return f"run{self.run}/leave/{meeting}"

    def _said(self, meeting: int) -> str:
        """Why, as the store has it: which may be anybody's words."""
        return escaped(self.own_store.get(self._key(meeting)).decode(errors="replace"))[:LONGEST]

    def _watch(self) -> None:
        """Runs in a thread for as long as the process does."""
        meeting = 0
        while not self.done.wait(SECONDS_BETWEEN_LOOKS):
            try:
                called = meeting <= self.meetings and self.own_store.check([self._key(meeting)])
            except RuntimeError:  # the launcher, and its store, have ended before this process
                return
            if not called:
                continue
            with self.lock:
                if self.meetings == meeting:
                    self._abort()
            self._require_leaving(meeting)
            meeting += 1

    def _abort(self) -> None:
        """End this rank's part in the collectives of a GPU, which leaving would wait for; nothing if that was done."""
        if self.fabric.device.type == "cuda":
            with suppress(Exception):
                distributed_c10d._abort_process_group()

    def _require_leaving(self, meeting: int) -> None:
        """End the process, should it wait in a broken collective for ever: no run may hang."""
        until = time.monotonic() + SECONDS_TO_LEAVE
        while self.meetings <= meeting and not self.done.is_set():
            if time.monotonic() > until:
                which = f"rank {self.fabric.global_rank} could not leave a collective that another rank has left"
                fix = "start the run again with a smaller memory.micro_batch_size"
                say(f"{which} ({self._said(meeting)}): {fix}")
                os._exit(1)
            time.sleep(SECONDS_BETWEEN_LOOKS)


def _forget_groups_of_meshes() -> None:
    """Device meshes live on in the caches of DTensor, and with them the old group and its connections."""
    for mesh in [one for one in gc.get_objects() if type(one) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()
