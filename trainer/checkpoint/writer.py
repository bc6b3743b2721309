"""How the ranks write a checkpoint together, each beside its training and none waiting for another.

Every rank writes its file and then, as a sign that it is on disk, a small JSON file that says what is in it. The first
rank waits for the signs of all, adds what all have in common and the manifest, and gives the folder its name. They
meet in the file system alone: collectives belong to training.
"""

from __future__ import annotations

import errno
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.folder import CheckpointFolder, Score, missing_space, no_space
from trainer.checkpoint.manifest import MANIFEST, STATE, Manifest
from trainer.checkpoint.parts import Part, describe_parts, write_parts
from trainer.errors import RunError
from trainer.system.files import read_regular, remove, write_atomic
from trainer.system.redact import redact

HISTORY = "metrics.csv"
SECONDS_BETWEEN_LOOKS = 0.02
SECONDS_BETWEEN_COUNTS = 1.0
MOST_REASON = 1 << 20  # bytes of what another rank says of its failure


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of training at a step boundary, in host memory: this rank's share."""

    step: int
    parts: Mapping[str, Part]  # what this rank writes
    own: Mapping[str, Any]  # what else is this rank's, as JSON: numbers of its optimizer's state, its random generators
    common: Mapping[str, Any]  # what all ranks have the same of, as JSON; only the first rank's is written
    history: bytes  # metrics.csv so far; only of the first rank
    manifest: Callable[[Mapping[str, Any]], Manifest]  # from the files' sizes and hashes

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensors, and of the history."""
        return sum(part.tensor.nbytes for part in self.parts.values()) + len(self.history)


@dataclass(frozen=True)
class Writer:
    """Writes snapshots into ``folder``."""

    folder: CheckpointFolder
    rank: int
    world_size: int
    attempt: str  # a name for this start of the run, the same on all ranks
    patience: float  # seconds that the first rank waits while nothing of the others arrives
    keep_last: int
    keep_best: int
    score: Score  # of an evaluation's figures; higher is better
    on_progress: Callable[[], None] = lambda: None  # called whenever something has reached the disk
    warn: Callable[[str], None] = lambda problem: None  # of what does not keep a checkpoint from being whole

    def write(self, snapshot: Snapshot) -> None:
        """Write this rank's share and, on the first rank, complete the checkpoint; a ``RunError`` says that the disk is
        full, or cannot be written to, and older checkpoints are then untouched."""
        staging = self.folder.staging(snapshot.step, self.attempt)
        try:
            staging.mkdir(parents=True, exist_ok=True)
            self._write_own(staging, snapshot)
            if self.rank == 0:
                self._complete(staging, snapshot)
        except OSError as error:
            failure = self._explained(error, snapshot)
            self._give_up(staging, str(failure))
            raise failure from error
        except BaseException as error:
            self._give_up(staging, str(error) or type(error).__name__)
            raise

    def _write_own(self, staging: Path, snapshot: Snapshot) -> None:
        name = sign_of(self.rank, "safetensors")
        entry = write_parts(staging / name, snapshot.parts, self.on_progress)
        content = {**snapshot.own, "file": {name: entry}, "tensors": describe_parts(name, snapshot.parts)}
        # As soon as the last sign is there, the first rank may give the folder, which it syncs itself, its name.
        write_atomic(staging / sign_of(self.rank), json.dumps(content), sync_folder=False)

    def _complete(self, staging: Path, snapshot: Snapshot) -> None:
        files: dict[str, Any] = {}
        for rank in range(self.world_size):
            text = self._wait_for(staging, rank)
            files |= json.loads(text)["file"]
            files[sign_of(rank)] = _entry(text)
        for name, content in ((STATE, json.dumps(snapshot.common).encode()), (HISTORY, snapshot.history)):
            write_atomic(staging / name, content)
            files[name] = _entry(content)
        write_atomic(staging / MANIFEST, snapshot.manifest(files).to_json())
        self.folder.commit(staging, snapshot.step)
        try:  # what is left of older ones is told, and no reason to end a training whose state is saved
            problems = self.folder.rotate(self.keep_last, self.keep_best, self.score)
        except OSError as error:
            problems = [f"{error.filename or self.folder.path} could not be looked through: {error.strerror}"]
        for problem in problems:
            self.warn(problem)

    def _wait_for(self, staging: Path, rank: int) -> bytes:
        """The sign of ``rank``, as soon as it is there."""
        arrived, looked, since = -1, 0.0, time.monotonic()
        while (now := time.monotonic()) - since < self.patience:
            with suppress(FileNotFoundError):
                return (staging / sign_of(rank)).read_bytes()
            if now - looked > SECONDS_BETWEEN_COUNTS:
                looked, before, arrived = now, arrived, _bytes_in(staging)
                if arrived != before:
                    since = now
                    self.on_progress()
            failure = staging / sign_of(rank, "failed")
            if failure.exists():
                raise RunError(f"rank {rank}: {read_regular(failure, MOST_REASON).decode(errors='replace')}")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        raise RunError(
            f"rank {rank} has written nothing of its part of {staging.name.split('.')[1]} for {self.patience:.0f} s: "
            f"is {self.folder.path} the same folder on all machines?"
        )

    def _give_up(self, staging: Path, why: str) -> None:
        """Tell the first rank; the first rank leaves nothing behind."""
        with suppress(OSError):  # the first rank's patience ends, then, or the next start clears it away
            if self.rank:
                (staging / sign_of(self.rank, "failed")).write_text(redact(why))
            else:
                remove(staging)

    def _explained(self, error: OSError, snapshot: Snapshot) -> RunError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = snapshot.nbytes
            return no_space(self.folder.path, snapshot.step, needed, max(1, missing_space(self.folder.path, needed)))
        return RunError(
            f"the checkpoint of step {snapshot.step} could not be written: {error.strerror or error} "
            f"({error.filename or self.folder.path}). Older checkpoints are untouched"
        )


class Background:
    """Runs one piece of work at a time beside the main thread, and hands its failure over when it is asked."""

    thread: threading.Thread | None = None
    failure: BaseException | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Begin ``work``, as soon as what was begun before has ended."""
        self.wait()
        self.thread = threading.Thread(target=self._guarded, args=(work,), name="checkpoint", daemon=True)
        self.thread.start()

    def ends(self, seconds: float | None = None) -> bool:
        """Wait so long, by default for as long as it takes, for what is at work; whether nothing is at work then."""
        if self.thread is not None:
            self.thread.join(seconds)
        return self.thread is None or not self.thread.is_alive()

    def wait(self) -> None:
        """Until nothing is at work; raises what the last work raised."""
        self.ends()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = error


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # one in the making has got its name meanwhile
            total += path.stat().st_size
    return total


def sign_of(rank: int, ending: str = "json") -> str:
    """The file that says that the tensors of ``rank``, in ``.safetensors``, are on disk, or, ``.failed``, why not."""
    return f"rank-{rank:05d}.{ending}"


def _entry(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
