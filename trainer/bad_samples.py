"""What a run tells of the samples that it left out: a warning each, and a file of all."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.checkpoint.store import write_atomic
from trainer.engine.quarantine import Finding, Quarantine
from trainer.redact import redact_value
from trainer.report.progress import warn

FILE = "quarantine.json"


def report_bad_samples(quarantine: Quarantine, new: list[Finding], run_dir: str | None) -> None:
    """Warn of each ``new`` finding, and write all findings to ``quarantine.json`` in ``run_dir``, if there is one.

    The file holds ``max_bad_samples`` and ``samples``: of each its split, its index there, its file or row, and why it
    could not be loaded.
    """
    for finding in new:
        warn(f"left out: {finding.describe()}")
    if run_dir is not None:
        content = {"max_bad_samples": quarantine.limit, **redact_value(quarantine.to_dict())}
        write_atomic(Path(run_dir) / FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
