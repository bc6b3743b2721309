"""Whether a run that was disturbed and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common import curve
from .run import ForkedRun


def checkpoints(run_dir: Path) -> list[Path]:
    """Those of a run, oldest first."""
    return sorted((run_dir / "checkpoints").glob("step-" + 8 * "?"))


def newest_step(run_dir: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    found = checkpoints(run_dir)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def digest(run_dir: Path) -> dict[str, Any]:
    """What a finished run has come to: its last checkpoint, its losses and the model that it wrote.

    The checkpoint's manifest has the hashes of every rank's tensors (weights, optimizer) and JSON (random generators).
    """
    newest = checkpoints(run_dir)[-1]
    files = json.loads((newest / "manifest.json").read_text())["files"]
    state = json.loads((newest / "state.json").read_text())
    del state["stopwatch"]
    return {
        "checkpoint": newest.name,
        "ranks": {name: entry["sha256"] for name, entry in files.items() if name.startswith("rank")},
        "state": state,
        "losses": curve(run_dir),
        "model": hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest(),
    }


def differences(run_dir: Path, reference: dict[str, Any]) -> list[str]:
    """The parts of its digest in which a run differs from the undisturbed one."""
    own = digest(run_dir)
    return [f"{name} differ" for name in own if own[name] != reference[name]]


class Samples:
    """The windows that the starts of a run have taken, one after the other, beside those of the undisturbed run.

    Args:
        reference: the lines of each rank, undisturbed.
    """

    def __init__(self, reference: Sequence[Sequence[str]]) -> None:
        self.reference = reference
        self.at = [0] * len(reference)
        """The window that each rank has come to."""
        self.problems: list[str] = []
        self.redone = 0
        """The most windows that a start has begun again."""

    def add(self, run: ForkedRun) -> None:
        """The next start: what it took must be a piece of the undisturbed run's, and leave no gap."""
        for rank, whole in enumerate(self.reference):
            taken = run.windows(rank)
            if not taken:
                continue
            start = whole.index(taken[0]) if taken[0] in whole else -1
            if start < 0 or list(whole[start : start + len(taken)]) != taken:
                self.problems.append(f"rank {rank} took other samples")
            elif start > self.at[rank]:
                self.problems.append(f"rank {rank} left out windows {self.at[rank]} to {start}")
            self.redone = max(self.redone, self.at[rank] - start)
            self.at[rank] = start + len(taken)

    def finish(self) -> list[str]:
        """What is wrong, if anything is."""
        if any(at != len(whole) for at, whole in zip(self.at, self.reference, strict=True)):
            self.problems.append("not all samples were taken")
        return self.problems
