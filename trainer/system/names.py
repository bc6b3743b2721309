"""Names of settings in other libraries, and suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from trainer.errors import closest_names

_LINES = Path(__file__).with_name("foreign_names.txt").read_text(encoding="utf-8").splitlines()[1:]
FOREIGN_NAMES = dict(line.split(": ") for line in _LINES)
"""The names of settings in transformers' Trainer, timm, Lightning and others."""

FOREIGN_SWITCHES = {
    "fp16": "memory.precision 16-mixed",
    "bf16": "memory.precision bf16-mixed",
    "gradient_checkpointing": "memory.activation_checkpointing full",
    "load_in_4bit": "model.lora.base nf4 --model.lora.rank 16",
    "torch_compile": "memory.compile blocks",
}
"""Flags of other trainers that often stand without a value, and what to give instead."""

OUR_NAMES = {word: key for key, words in FOREIGN_NAMES.items() for word in words.split()}


def foreign_switch(flag: str) -> str | None:
    """Return what to give instead of a switch of other trainers, or ``None``."""
    return FOREIGN_SWITCHES.get(flag.replace("-", "_").lower())


def did_you_mean(name: str, names: Collection[str], dashes: str = "") -> str:
    """Return "; did you mean NAME?" with a similar name, first from the same section, or ""."""
    section, dot, last = name.replace("-", "_").lower().rpartition(".")
    parts = [(full.rpartition(".")[2], full) for full in names]
    wanted = OUR_NAMES.get(last, "")
    if meant := [full for full in (wanted, wanted.rpartition(".")[2]) if full and full in names]:
        return f"; did you mean {dashes}{meant[0]}?"
    beside = {end: full for end, full in parts if full == section + dot + end}
    everywhere = dict(reversed(parts))  # the first of equal names wins
    exact = {last: everywhere[last]} if last in everywhere else {}
    for candidates, cutoff in ((exact, 1), (beside, 0.6), (everywhere, 0.75)):
        for close in closest_names(last, candidates, cutoff):
            return f"; did you mean {dashes}{candidates[close]}?"
    return ""


def unknown_keyword(kind: str, name: str, fields: Collection[str]) -> str:
    """Return a message about the keyword ``name``, which the class ``kind`` does not have, with a suggestion."""
    key = OUR_NAMES.get(name) or next((key for key in FOREIGN_NAMES if key.rpartition(".")[2] == name), "")
    section, _, last = key.rpartition(".")
    hint = f"; did you mean {last}?" if last in fields else did_you_mean(name, fields)
    if not hint and section in fields:
        hint = f"; it is in {section}: {section}={section.title()}({last}=...)"
    return f"{kind} has no setting {name!r}{hint or '; it has ' + ', '.join(fields)}"
