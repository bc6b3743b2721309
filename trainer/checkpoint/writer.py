"""Writing of a checkpoint by all ranks, concurrently with training, without waiting for each other.

Every rank writes its tensors and then a small JSON file, its completion file, which describes them. The first rank
waits for the completion files of all ranks, adds the common state and the manifest, and renames the folder. Ranks
communicate only through the file system, because collectives belong to training.
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

from trainer.checkpoint.folder import CheckpointFolder, Score, disk_full_message, disk_space_shortfall
from trainer.checkpoint.manifest import MANIFEST, STATE, Manifest
from trainer.checkpoint.tensor_parts import TensorPart, index_parts, write_parts
from trainer.errors import RunError
from trainer.system.files import read_regular, remove, write_atomic
from trainer.system.redact import redact

HISTORY = "metrics.csv"
POLL_INTERVAL = 0.02
PROGRESS_INTERVAL = 1.0
MAX_REASON_BYTES = 1 << 20  # max bytes of another rank's error message


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of training at a step boundary, in host memory: this rank's share."""

    step: int
    parts: Mapping[str, TensorPart]  # tensors that this rank writes
    rank_state: Mapping[str, Any]  # other state of this rank, as JSON: numbers of the optimizer, random generators
    shared_state: Mapping[str, Any]  # state that is the same on all ranks, as JSON; written by the first rank
    history: bytes  # metrics.csv so far, on the first rank only
    manifest: Callable[[Mapping[str, Any]], Manifest]  # creates the manifest from the files' sizes and hashes

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensors and of the history."""
        return sum(part.tensor.nbytes for part in self.parts.values()) + len(self.history)


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes snapshots into ``folder``."""

    folder: CheckpointFolder
    rank: int
    world_size: int
    attempt: str  # name of this start of the run, the same on all ranks
    timeout: float  # seconds without progress of another rank after which the first rank gives up
    keep_last: int
    keep_best: int
    score: Score  # rates the metrics of an evaluation; higher is better
    on_progress: Callable[[], None] = lambda: None  # called after each write
    warn: Callable[[str], None] = lambda problem: None  # called for problems that leave the checkpoint complete

    def write(self, snapshot: Snapshot) -> None:
        """Write this rank's share; the first rank completes the checkpoint. An error leaves older ones unchanged."""
        staging = self.folder.staging(snapshot.step, self.attempt)
        try:
            staging.mkdir(parents=True, exist_ok=True)
            self._write_own(staging, snapshot)
            if self.rank == 0:
                self._complete(staging, snapshot)
        except OSError as error:
            failure = self._to_run_error(error, snapshot)
            self._abort(staging, str(failure))
            raise failure from error
        except BaseException as error:
            self._abort(staging, str(error) or type(error).__name__)
            raise

    def _write_own(self, staging: Path, snapshot: Snapshot) -> None:
        name = done_marker(self.rank, "safetensors")
        entry = write_parts(staging / name, snapshot.parts, self.on_progress)
        content = {**snapshot.rank_state, "file": {name: entry}, "tensors": index_parts(name, snapshot.parts)}
        # Once the last completion file exists, the first rank may rename the folder; it syncs the folder itself.
        write_atomic(staging / done_marker(self.rank), json.dumps(content), sync_folder=False)

    def _complete(self, staging: Path, snapshot: Snapshot) -> None:
        files: dict[str, Any] = {}
        for rank in range(self.world_size):
            text = self._wait_for(staging, rank)
            files |= json.loads(text)["file"]
            files[done_marker(rank)] = _entry(text)
        for name, content in ((STATE, json.dumps(snapshot.shared_state).encode()), (HISTORY, snapshot.history)):
            write_atomic(staging / name, content)
            files[name] = _entry(content)
        write_atomic(staging / MANIFEST, snapshot.manifest(files).to_json())
        self.folder.commit(staging, snapshot.step)
        try:  # failing to remove old checkpoints is reported, but does not end a training whose state is saved
            problems = self.folder.rotate(self.keep_last, self.keep_best, self.score)
        except OSError as error:
            problems = [f"{error.filename or self.folder.path} could not be listed: {error.strerror}"]
        for problem in problems:
            self.warn(problem)

    def _wait_for(self, staging: Path, rank: int) -> bytes:
        arrived, looked, since = -1, 0.0, time.monotonic()
        while (now := time.monotonic()) - since < self.timeout:
            with suppress(FileNotFoundError):
                return (staging / done_marker(rank)).read_bytes()
            if now - looked > PROGRESS_INTERVAL:
                looked, before, arrived = now, arrived, _bytes_in(staging)
                if arrived != before:
                    since = now
                    self.on_progress()
            failure = staging / done_marker(rank, "failed")
            if failure.exists():
                raise RunError(f"rank {rank}: {read_regular(failure, MAX_REASON_BYTES).decode(errors='replace')}")
            time.sleep(POLL_INTERVAL)
        cause = f"rank {rank} has not written to its part of {staging.name.split('.')[1]} for {self.timeout:.0f} s"
        raise RunError(f"{cause}: check that {self.folder.path} is the same folder on all machines")

    def _abort(self, staging: Path, why: str) -> None:
        """Report the failure to the first rank; the first rank itself removes the folder."""
        with suppress(OSError):  # then the first rank times out, or the next start removes the folder
            if self.rank:
                (staging / done_marker(self.rank, "failed")).write_text(redact(why))
            else:
                remove(staging)

    def _to_run_error(self, error: OSError, snapshot: Snapshot) -> RunError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed, missing = snapshot.nbytes, disk_space_shortfall(self.folder.path, snapshot.nbytes)
            return disk_full_message(self.folder.path, snapshot.step, needed, max(1, missing))
        cause = f"{error.strerror or error} ({error.filename or self.folder.path}). Older checkpoints are unchanged"
        return RunError(f"the checkpoint of step {snapshot.step} could not be written: {cause}")


class BackgroundTask:
    """Runs one function at a time in a background thread; ``wait`` raises its error."""

    thread: threading.Thread | None = None
    failure: BaseException | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Start ``work`` after waiting for the previous work."""
        self.wait()
        self.thread = threading.Thread(target=self._guarded, args=(work,), name="checkpoint", daemon=True)
        self.thread.start()

    def join(self, seconds: float | None = None) -> bool:
        """Wait at most ``seconds`` (``None``: no limit) for the current work; return whether it has ended."""
        if self.thread is not None:
            self.thread.join(seconds)
        return self.thread is None or not self.thread.is_alive()

    def wait(self) -> None:
        """Wait until the work has ended, and raise its error, if any."""
        self.join()
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
        with suppress(FileNotFoundError):  # a temporary file may have been renamed meanwhile
            total += path.stat().st_size
    return total


def done_marker(rank: int, suffix: str = "json") -> str:
    """Return the name of a file of ``rank``: ``.json`` completion file, ``.safetensors`` tensors, ``.failed`` error."""
    return f"rank-{rank:05d}.{suffix}"


def _entry(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
