"""``supervisor.json``: every attempt of a supervised run, as far as it has come."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.manifest import MOST_BYTES
from trainer.checkpoint.store import write_atomic
from trainer.redact import redact, redact_words
from trainer.supervise.attempt import say
from trainer.system.files import read_regular

NAME = "supervisor.json"


class Journal:
    """Written anew whenever an attempt begins or ends, without secrets. What an earlier supervisor wrote is kept.

    Args:
        run_dir: where it is written.
        command: of the run, as it is started first.
    """

    def __init__(self, run_dir: Path, command: list[str]) -> None:
        self.path = run_dir / NAME
        self.content: dict[str, Any] = {"command": redact_words(command), "status": "running"}
        self.content["attempts"] = _earlier(self.path)

    def begin(self, step: int, command: list[str]) -> None:
        """An attempt begins, with the newest checkpoint at ``step`` (-1: none)."""
        entry = {"start": _now(), "end": None, "exit_code": None, "cause": None, "from_step": _or_none(step)}
        self.content["attempts"].append({**entry, "step": None, "command": redact_words(command)})
        self._write()

    def end(self, exit_code: int, cause: str, step: int) -> None:
        """It has ended, with the newest checkpoint at ``step``; minus a signal's number for one that was killed."""
        ended = {"end": _now(), "exit_code": exit_code, "cause": redact(cause) or None, "step": _or_none(step)}
        self.content["attempts"][-1].update(ended)
        self._write()

    def close(self, status: str) -> None:
        """No attempt follows: finished, stopped, interrupted or failed."""
        self.content["status"] = status
        self._write()

    def _write(self) -> None:
        try:
            write_atomic(self.path, json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk may be what the run has died of, and may have space again
            say(f"{self.path} could not be written: {error.strerror or error}")


def newest_step(run_dir: Path) -> int:
    """Of the newest checkpoint, by its name; -1 when there is none."""
    names = [path.name for path in CheckpointFolder(run_dir / "checkpoints").newest_first()]
    return int(names[0].removeprefix("step-")) if names else -1


def _earlier(path: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(read_regular(path, MOST_BYTES))["attempts"]
        return found if isinstance(found, list) else []
    return []


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _or_none(step: int) -> int | None:
    return step if step >= 0 else None
