"""Write the tables of docs/equality.md: ``python docs/generate/equality.py``, about ten minutes on two cores.

Each cell is a run of the tests: three optimizer steps in float64 on 1 to 3 ranks, compared with a plain loop
over whole batches. The errors are those of ``tests/models/test_preferences.py``, ``test_masked.py`` and
``tests/engine/test_two_pass.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / one) for one in ("", "tests", "tests/models", "tests/engine"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import test_masked
import test_preferences
import test_two_pass
import torch
import transformers
from helpers.ranks import end_rank_pools, rank_pool

PAGE = Path(__file__).resolve().parents[1] / "equality.md"
START, END = "<!-- results -->", "<!-- end of results -->"
PLACES = [("auto", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 3)]
SPLITS = [(1, None), (3, None), (8, None)]
Error = Callable[[Any, Any, str, bool | None], float]


def preferences(loss: str) -> Error:
    """Return the error of a loss of pairs for a split, place, checkpointing and packing."""

    def error(cut: Any, place: Any, checkpointing: str, free: bool | None) -> float:
        case = test_preferences.case_of(loss, "llama", cut, place, checkpointing, free=free)
        return test_preferences.error(case, rank_pool)

    return error


def masked(cut: Any, place: Any, checkpointing: str, free: bool | None) -> float:
    """Return the error of a masked language model, a BERT."""
    return test_masked.error(test_masked.case_of("bert", cut, place, checkpointing, free=free), rank_pool)


def negatives(cut: Any, place: Any, checkpointing: str, free: bool | None) -> float:
    """Return the error of embeddings of triples with in-batch negatives, a BERT."""
    settings = {"strategy": place[0], "activation_checkpointing": checkpointing, "padding_free": free}
    settings["micro_batch_tokens"] = cut[1]
    return test_two_pass.error(test_two_pass.pairs(place[1], cut[0], **settings), rank_pool)


TABLES: dict[str, tuple[list[Any], Error]] = {
    "In-batch negatives": ([*SPLITS, (8, 64)], negatives),
    "Masked language model": ([*SPLITS, (8, 48)], masked),
    # Last, because the samples of pairs are collated in another way from then on.
    **{name: ([*SPLITS, (8, 96)], preferences(name.lower())) for name in ("DPO", "IPO", "ORPO", "SimPO")},
}


def name_of(cut: tuple[int, int | None]) -> str:
    """Return the first cell of a row."""
    samples, tokens = cut
    return f"{samples} sample{'s' * (samples > 1)}" + (f", at most {tokens} tokens" if tokens else "")


def rows(splits: list[Any], error: Error) -> Iterator[str]:
    """Yield the rows of a table; each cell is the largest error of four runs."""
    heads = [f"{place}, {count_of(size)}" if size > 1 or place == "fsdp" else "1 rank" for place, size in PLACES]
    yield "| micro-batch | " + " | ".join(heads) + " |"
    yield "|---|" + "--:|" * len(PLACES)
    for cut in splits:
        cells = []
        for place in PLACES:
            runs = [(cut, place, *rest) for rest in product(("none", "full"), (None, False))]
            cells.append(f"{max(error(*run) for run in runs):.1e}")
        yield f"| {name_of(cut)} | " + " | ".join(cells) + " |"
        print(name_of(cut), *cells, flush=True)
    end_rank_pools()


def count_of(size: int) -> str:
    """Return a number of ranks."""
    return f"{size} rank{'s' * (size > 1)}"


def main() -> None:
    """Measure all tables, and write them to the page."""
    done = [line for name, table in TABLES.items() for line in (f"### {name}", "", *rows(*table), "")]
    versions = f"torch {torch.__version__.partition('+')[0]} and transformers {transformers.__version__}"
    when = f"Measured on {datetime.now(timezone.utc):%Y-%m-%d} with {versions}."
    before, rest = PAGE.read_text().split(START)
    text = "\n".join([when, "", *done]).rstrip()
    PAGE.write_text(f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
