"""What a run tells of the samples that it left out: a warning each, and a file of all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tqdm import tqdm

from trainer.checkpoint.store import write_atomic
from trainer.engine.quarantine import Finding, Quarantine
from trainer.redact import redact, redact_value
from trainer.system.text import escaped

FILE = "quarantine.json"


def report_bad_samples(quarantine: Quarantine, new: list[Finding], run_dir: str | None) -> None:
    """Warn of each ``new`` finding, and write all findings to ``quarantine.json`` in ``run_dir``, if there is one.

    The file holds ``max_bad_samples`` and ``samples``: of each its split, its index there, its file or row, and why it
    could not be loaded.
    """
    for finding in new:  # above a bar, if there is one
        tqdm.write(escaped(f"trainer: warning: left out: {redact(finding.describe())}"), file=sys.stderr)
    if run_dir is not None:
        content = {"max_bad_samples": quarantine.limit, **redact_value(quarantine.to_dict())}
        write_atomic(Path(run_dir) / FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
