"""What streamed texts cost: samples a second and host memory, beside texts tokenised before.

    python benchmarks/streaming.py --tokenizer FOLDER [--part speed|memory] [--reviews 200000] [--out NAME]

Reviews are made up: words of a fixed list, as many as drawn for each. Speed is that of the loader alone, no model: one
epoch in the order of training, in micro-batches of 32, the median of the repeats. Memory is that of processes which
each read every sample once, as the ranks of one machine would if they had all samples.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from common import Record, machine, process_memory
from transformers import AutoTokenizer

from trainer.data import StreamedText, TextFiles
from trainer.data.loader import Loader
from trainer.engine.order import batch_indices
from trainer.values import Request

WORDS = ["the", "a", "film", "is", "was", "good", "bad", "great", "not", "very", "story", "actor", "scene", "dull"]
BATCH, ROW_GROUP, SHARDS = 32, 1000, 8
CHILD = "--child"


def write_reviews(folder: Path, count: int, mean_words: int) -> tuple[Path, Path]:
    """As one file, and as shards of the same rows."""
    drawn = random.Random(0)
    texts = [
        " ".join(drawn.choices(WORDS, k=drawn.randint(mean_words // 2, mean_words * 3 // 2))) for _ in range(count)
    ]
    table = pa.table({"text": texts, "label": [index % 2 for index in range(count)]})
    whole, shards = folder / "whole.parquet", folder / "shards"
    shards.mkdir(parents=True)
    pq.write_table(table, whole, row_group_size=ROW_GROUP)
    each = -(-count // SHARDS)
    for shard in range(SHARDS):
        part = table.slice(shard * each, each)
        pq.write_table(part, shards / f"part-{shard}.parquet", row_group_size=ROW_GROUP, write_page_checksum=True)
    return whole, shards


def dataset(kind: str, folder: Path) -> Any:
    """The prepared dataset over what ``write_reviews`` has left."""
    settings = {"cache_dir": str(folder / "cache")}
    if kind == "streamed":
        return StreamedText(str(folder / "shards"), **settings)
    return TextFiles(str(folder / "whole.parquet"), **settings)


def requests(split: Any) -> Iterator[Request]:
    """One epoch as one rank is asked for it."""
    size, groups = len(split), getattr(split, "groups", None)
    for step in range(-(-size // BATCH)):
        yield Request(batch_indices(0, 0, step, size, BATCH, groups))


def measure_speed(record: Record, folder: Path, tokenizer: Any, arguments: argparse.Namespace) -> None:
    write_reviews(folder, arguments.speed_reviews, arguments.words)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process, with workers or without
    found, before_training, rates = dict[str, Any](), dict[str, float](), dict[str, list[float]]()
    for kind in ("tokenised", "streamed"):
        began = time.perf_counter()
        found[kind] = dataset(kind, folder)
        found[kind].prepare(tokenizer)
        before_training[kind] = round(time.perf_counter() - began, 2)
    for _ in range(arguments.repeats):
        for kind, data in found.items():
            for workers in arguments.workers:
                loader = Loader(data.train, data.collate, workers=workers)
                began = time.perf_counter()
                samples = sum(len(batch["labels"]) for batch in loader(requests(data.train)))
                rates.setdefault(f"{kind}, {workers} workers", []).append(samples / (time.perf_counter() - began))
    split = found["streamed"].train
    split.reader.decoded, began = 0, time.perf_counter()
    for request in requests(split):
        for index in request.indices:
            split.reader.row(index)
    reading = len(split) / (time.perf_counter() - began)
    figures = {
        name: {"median": round(statistics.median(values)), "all": list(map(round, values))}
        for name, values in rates.items()
    }
    record.write(
        speed={
            "reviews": arguments.speed_reviews,
            "mean_words": arguments.words,
            "machine": machine(),
            "seconds_before_training": before_training,
            "samples_per_second": figures,
            "rows_read_per_second_without_tokenising": round(reading),
        }
    )


def measure_memory(record: Record, folder: Path, arguments: argparse.Namespace) -> None:
    whole, _ = write_reviews(folder, arguments.reviews, arguments.memory_words)
    text_bytes = pq.ParquetFile(whole).metadata.row_group(0).column(0).total_uncompressed_size
    found: dict[str, Any] = {}
    for kind in ("tokenised", "streamed"):
        _processes(kind, 1, folder, arguments.tokenizer)  # the one that tokenises keeps some memory of that
        for count in (1, 3):
            found[f"{kind}, {count} processes"] = _processes(kind, count, folder, arguments.tokenizer)
    tokens = sum(path.stat().st_size for path in (folder / "cache").glob("trainer/*/tokens.arrow"))
    record.write(
        memory={
            "reviews": arguments.reviews,
            "mean_words": arguments.memory_words,
            "machine": machine(),
            "text_mb_of_a_row_group": round(text_bytes / 1e6, 2),
            "tokens_on_disk_mb": round(tokens / 1e6, 1),
            "processes": found,
        }
    )


def _processes(kind: str, count: int, folder: Path, tokenizer: str) -> dict[str, Any]:
    """What ``count`` processes at once take, in MB: of their own each, and their shares of the file of tokens."""
    command = [sys.executable, __file__, CHILD, kind, str(folder), tokenizer]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    for process in children:  # all have read everything, and none has ended
        process.stdout.readline()
    answers = []
    for process in children:
        process.stdin.write("look\n")
        process.stdin.flush()
        answers.append(json.loads(process.stdout.readline()))
    for process in children:
        process.communicate("end\n")
    return {
        "own_mb_each": [answer["own_mb"] for answer in answers],
        "share_of_the_tokens_mb_each": [answer["share_mb"] for answer in answers],
        "total_mb": round(sum(answer["own_mb"] + answer["share_mb"] for answer in answers), 1),
    }


def child(kind: str, folder: Path, tokenizer: str) -> None:
    """Prepare, read every sample, say so, and, when asked, print what that has taken."""
    import datasets  # noqa: F401 - what is imported is not of the data
    import sklearn.model_selection  # noqa: F401

    import trainer.data.shards
    import trainer.data.tokens  # noqa: F401

    data, words = dataset(kind, folder), AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    words(["a text"])
    private_memory = partial(process_memory, "Pss_Anon", file="smaps_rollup")
    before = private_memory()
    data.prepare(words)
    for request in requests(data.train):
        for index in request.indices:
            data.train.reader.row(index) if kind == "streamed" else data.train[index]
    print("done", flush=True)
    sys.stdin.readline()
    own, share = private_memory() - before, _share_of("tokens.arrow")
    print(json.dumps({"own_mb": round(own / 1e6, 1), "share_mb": round(share / 1e6, 1)}), flush=True)
    sys.stdin.readline()  # shares are less as long as the others are there


def _share_of(name: str) -> int:
    """This process's share (Pss) of the pages of mapped files called ``name``."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and not line.split(" ", 1)[0].endswith(":"):
            inside = line.endswith(f"/{name}")
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def main() -> None:
    if CHILD in sys.argv:
        child(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a folder that AutoTokenizer reads")
    parser.add_argument("--part", choices=("all", "speed", "memory"), default="all")
    parser.add_argument("--reviews", type=int, default=200_000, help="of the part memory")
    parser.add_argument("--memory-words", type=int, default=40, help="of a review there, in the mean")
    parser.add_argument("--speed-reviews", type=int, default=4_000, help="of the part speed")
    parser.add_argument("--words", type=int, default=230, help="of a review there, in the mean: as in IMDb")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="streaming")
    arguments = parser.parse_args()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "part", "tokenizer")}
    record = Record(arguments.out, settings)
    if arguments.part != "all" and record.path.exists():
        before = json.loads(record.path.read_text())
        record.content |= {part: before[part] for part in ("speed", "memory") if part in before}
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer, trust_remote_code=False)
    with tempfile.TemporaryDirectory() as place:
        if arguments.part in ("all", "memory"):
            measure_memory(record, Path(place) / "memory", arguments)
        if arguments.part in ("all", "speed"):
            measure_speed(record, Path(place) / "speed", tokenizer, arguments)
    record.write(complete=all(part in record.content for part in ("speed", "memory")))
    print(json.dumps(record.content, indent=1))


if __name__ == "__main__":
    main()
