"""Memory and speed on one GPU: the published ladder of ViT-L/16, ours below it, training under a cap, long texts.

Every row is a ``trainer fit`` in a fresh process, with random weights and data made in memory. About eight minutes on
an H200; ``python benchmarks/gpu.py ladder`` takes three. Nothing is downloaded. ``python benchmarks/gpu.py planner``
is another benchmark, of the memory that is predicted: see ``planner.py``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import RESULTS, Record, table, workplace

from trainer.trial import Trial, probe_machine, run_trial

HERE = Path(__file__).parent
EPOCH = 50_000
"""Images of CIFAR-10's training set: the published minutes are those of one epoch."""
ROW_SECONDS = 80.0
BF16_ROUNDING = 0.01
"""Relative: bf16 has 8 bits of precision, so that each rounding is up to 0.4 % off."""
REPRODUCED = 1.05
"""A published peak counts as reproduced when ours is at most 5 % above it: allocators and kernels differ."""

VOCABULARY = {"distilbert": 30_522, "bigbird": 50_358}
PART_SECONDS = {"ladder": 210.0, "caps": 150.0, "text": 110.0}


@dataclass(frozen=True)
class Row:
    """One run.

    Args:
        name: in the table.
        recipe: the file in benchmarks/recipes.
        settings: what differs from the recipe.
        target: ``(kind, GB)``: the most memory, allocated or reserved, that it may take.
        published: whether the target was published by others, and is to be reproduced, not undercut.
        cap_gb: the memory that the process is given, in GB.
        reference: the row whose loss it must have within bf16's rounding; ``None`` where it need not.
        steps: fewer than the others take, for a slow one.
        environment: variables to set.
    """

    name: str
    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    target: tuple[str, float] | None = None
    published: bool = False
    cap_gb: float | None = None
    reference: str | None = None
    steps: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def limit_gb(self) -> float | None:
        """The most memory that counts as meeting the target."""
        return self.target and self.target[1] * (REPRODUCED if self.published else 1)


def memory(micro_batch_size: int, precision: str = "bf16-mixed", **knobs: Any) -> dict[str, Any]:
    """Settings of ``memory``."""
    found = {"micro_batch_size": micro_batch_size, "precision": precision, **knobs}
    return {f"memory.{key}": value for key, value in found.items()}


CHECKPOINTED = {"activation_checkpointing": "full"}
OPTIMIZER = {**CHECKPOINTED, "cpu_offload": "optimizer"}
STREAMED = {**CHECKPOINTED, "cpu_offload": "parameters"}
SMALL_BATCH = {"batch_size": 16}
SMALL_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:1", "CUBLASLT_WORKSPACE_SIZE": "4096"}
"""4 MiB each for the scratch memory of matrix products, instead of 32 MiB on a Hopper GPU, which count as allocated."""
FEW_GAPS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Lets a cap on reserved memory be met: else the gaps in the allocator's segments of 20 MiB count, too."""
FP32, BF16 = "batch 64, 32-true", "bf16-mixed, uncapped"


def published(name: str, reserved_gb: float, settings: Mapping[str, Any]) -> Row:
    """A row of the published ladder."""
    return Row(name, "vit_l_16", settings, target=("reserved", reserved_gb), published=True)


def ours(name: str, settings: Mapping[str, Any], target_gb: float | None = None) -> Row:
    """A row of the exact ladder: batch 64 and AdamW throughout."""
    target = ("allocated", target_gb) if target_gb else None
    environment = SMALL_WORKSPACE if target else {}
    return Row(name, "vit_l_16", settings, target, reference=FP32, environment=environment)


def capped(gigabytes: float, settings: Mapping[str, Any], steps: int | None = None) -> Row:
    """A row that must train under a cap, with the loss of the uncapped run."""
    name = f"under {gigabytes:g} GB"
    return Row(
        name,
        "vit_l_16",
        settings,
        ("reserved", gigabytes),
        cap_gb=gigabytes,
        reference=BF16,
        steps=steps,
        environment=SMALL_WORKSPACE | FEW_GAPS,
    )


def text(name: str, recipe: str, target_gb: float, reference: str) -> Row:
    """A row of a text model with all but its bf16 weights off the device."""
    settings, target = memory(1, **OPTIMIZER), ("allocated", target_gb)
    return Row(name, recipe, settings, target, reference=reference, environment=SMALL_WORKSPACE)


PARTS: dict[str, list[Row]] = {
    "ladder": [
        published(FP32, 26.8, memory(64, "32-true")),
        published("batch 64, 16-mixed", 18.2, memory(64, "16-mixed")),
        published("batch 64, bf16-true (lossy)", 13.8, memory(64, "bf16-true")),
        published("batch 16, bf16-true (lossy)", 5.7, SMALL_BATCH | memory(16, "bf16-true")),
        published("batch 16 as 4 × 4, bf16-true (lossy)", 3.9, SMALL_BATCH | memory(4, "bf16-true")),
        published("the same with SGD", 2.02, SMALL_BATCH | memory(4, "bf16-true") | {"optim.name": "sgd"}),
        ours("exact: batch 64, bf16-mixed, full checkpointing", memory(64, **CHECKPOINTED)),
        ours("exact: + micro-batches of 4", memory(4, **CHECKPOINTED)),
        ours("exact: + optimizer offload, of 1", memory(1, **OPTIMIZER), 0.70),
        ours("exact: + parameters streamed, of 2", memory(2, **STREAMED), 0.25),
    ],
    "caps": [
        Row(BF16, "vit_l_16", memory(64)),
        capped(2.0, memory(8, **OPTIMIZER)),
        capped(1.0, memory(4, **OPTIMIZER)),
        capped(0.7, memory(1, **OPTIMIZER), steps=3),
        capped(0.25, memory(1, **STREAMED), steps=3),
    ],
    "text": [
        Row("DistilBERT, whole batch", "distilbert", memory(12)),
        text("DistilBERT, offloaded", "distilbert", 0.30, reference="DistilBERT, whole batch"),
        Row("BigBird, micro-batches of 1", "bigbird", memory(1)),
        text("BigBird, offloaded", "bigbird", 0.60, reference="BigBird, micro-batches of 1"),
    ],
}
TINY = {
    "vit_l_16": {
        "model.name": "custom",
        "model.patch_size": 8,
        "model.layers": 2,
        "model.heads": 2,
        "model.width": 16,
        "model.mlp_width": 16,
        "data.image_size": 16,
    },
    "distilbert": {"model.config": "{n_layers: 2, dim: 16, hidden_dim: 16, n_heads: 2}", "data.tokens": 16},
    "bigbird": {
        "model.config": "{num_hidden_layers: 2, hidden_size: 16, intermediate_size: 16, num_attention_heads: 2}",
        "data.tokens": 16,
    },
}
"""The same runs with small models, to test this file where there is no GPU."""


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


@dataclass
class Benchmark:
    """What all rows share.

    Args:
        accelerator: cuda or cpu.
        tiny: whether models are small.
        steps: of every run.
        work: a folder for the runs.
    """

    accelerator: str
    tiny: bool
    steps: int
    work: Path
    tokenizers: dict[int, Path] = field(default_factory=dict)

    def measure(self, row: Row, seconds: float) -> Trial:
        """Run ``row``, for at most so many seconds."""
        settings = {
            "max_steps": min(self.steps, row.steps or self.steps),
            "run.accelerator": self.accelerator,
            "run.devices": 1,
            "run.evaluate": "false",
            "run.recover": "false",
            **(TINY[row.recipe] if self.tiny else {}),
            **row.settings,
        }
        if row.recipe in VOCABULARY:
            settings["model.tokenizer"] = self.tokenizer(100 if self.tiny else VOCABULARY[row.recipe])
        flags = [f"--{key}={value}" for key, value in settings.items()]
        entry = None if row.cap_gb is None else (str(HERE / "capped.py"), str(row.cap_gb))
        run_dir = self.work / "".join(letter if letter.isalnum() else "-" for letter in row.name)
        arguments = [str(HERE / "recipes" / f"{row.recipe}.py"), *flags]
        return run_trial(arguments, run_dir, seconds=seconds, entry=entry, environment=row.environment)

    def tokenizer(self, words: int) -> Path:
        """A folder with a tokenizer of so many words."""
        if words not in self.tokenizers:
            sys.path.insert(0, str(HERE / "recipes"))
            from synthetic import make_tokenizer

            self.tokenizers[words] = make_tokenizer(self.work / f"tokenizer-{words}", words)
        return self.tokenizers[words]


def judge(row: Row, trial: Trial, losses: Mapping[str, list[float]]) -> dict[str, Any]:
    """What is written about a row: the figures, the target, and whether all that was asked of it is met."""
    pairs = list(zip(trial.losses, losses.get(row.reference or "", []), strict=False))  # of as many steps as both have
    difference = max((abs(own / other - 1) for own, other in pairs), default=None)
    found = {
        "name": row.name,
        **trial.to_json(),
        "allocated_gb": trial.memory.get("allocated_gb"),
        "reserved_gb": trial.memory.get("reserved_gb"),
        "loss_difference": difference,
        "minutes_an_epoch": epoch_minutes(row, trial),
        "cap_gb": row.cap_gb,
        "environment": dict(row.environment),
        "target": row.target and {"kind": row.target[0], "gb": row.target[1], "published": row.published},
    }
    return found | {"met": met(row, found)}


def met(row: Row, found: Mapping[str, Any]) -> bool | None:
    """Whether the run finished within its target and with the loss that it must have; ``None`` without a target."""
    if row.target is None or row.limit_gb is None:
        return None
    peak = found[f"{row.target[0]}_gb"]
    if found["status"] != "finished" or peak is None or peak > row.limit_gb:
        return False
    difference = found["loss_difference"]
    return row.reference is None or (difference is not None and difference <= BF16_ROUNDING)


def epoch_minutes(row: Row, trial: Trial) -> float | None:
    """Minutes that 50,000 images would take, as published."""
    if row.recipe != "vit_l_16" or not trial.samples_per_second:
        return None
    return round(EPOCH / trial.samples_per_second / 60, 2)


def run(benchmark: Benchmark, parts: Mapping[str, list[Row]], record: Record, factor: float) -> dict[str, list[Any]]:
    """Measure part by part, each within its time; what it has no time for is a row that says so."""
    results: dict[str, list[Any]] = {name: [] for name in parts}
    record.write(parts=results)
    for name, rows in parts.items():
        end = time.monotonic() + factor * PART_SECONDS[name]
        losses: dict[str, list[float]] = {}
        for number, row in enumerate(rows, 1):
            print(f"{name} {number}/{len(rows)}: {row.name} ...", flush=True)
            left = end - time.monotonic()
            if left < 5:
                trial = Trial("not run", f"the {factor * PART_SECONDS[name]:.0f} s of this part are used up", [], 0.0)
            else:
                trial = benchmark.measure(row, min(left, ROW_SECONDS))
            losses[row.name] = trial.losses
            results[name].append(judge(row, trial, losses))
            record.write(parts=results)
            print(f"  {trial.status} in {trial.seconds:.0f} s: {trial.reason or trial.plan}", flush=True)
    record.write(complete=True, parts=results)
    return results


# ----------------------------------------------------------------------------------------------------------------------
# Reporting and the command line


def report(results: Mapping[str, list[dict[str, Any]]]) -> str:
    """The table of a part, for all parts."""
    header = ("run", "GB allocated", "GB reserved", "samples/s", "min/epoch", "loss", "difference", "target", "met")
    tables = []
    for name, found in results.items():
        rows = [
            (
                row["name"],
                figure(row["allocated_gb"], ".3f"),
                figure(row["reserved_gb"], ".3f"),
                figure(row["samples_per_second"], ",.1f"),
                figure(row["minutes_an_epoch"], ".2f"),
                f"{row['losses'][0]:.4f} → {row['losses'][-1]:.4f}" if row["losses"] else "–",
                figure(row["loss_difference"], ".1e"),
                f"{row['target']['kind']} {row['target']['gb']:g}" if row["target"] else "–",
                {True: "yes", False: "no", None: "–"}[row["met"]] if row["status"] == "finished" else row["status"],
            )
            for row in found
        ]
        tables.append(f"{name}\n\n{table(header, rows)}\n")
    return "\n".join(tables)


def figure(value: float | None, form: str) -> str:
    """A number, or a dash for none."""
    return "–" if value is None else format(value, form)


def choose(parts: list[str], only: str | None) -> dict[str, list[Row]]:
    """The parts asked for, all by default; with ``only`` rows whose name contains one of its words, and references."""
    chosen = {name: PARTS[name] for name in PARTS if name in parts or not parts}
    if only is None:
        return chosen
    words = [word.strip() for word in only.split(",")]
    found = {}
    for name, rows in chosen.items():
        wanted = [row for row in rows if any(word in row.name for word in words)]
        needed = {row.reference for row in wanted}
        if wanted:
            found[name] = [row for row in rows if row in wanted or row.name in needed]
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--steps", type=int, default=4, help="of every run; the first is not timed")
    parser.add_argument("--only", help="rows whose name contains one of these words, with commas")
    parser.add_argument("--time", type=float, default=1.0, help="factor on the time that each part may take")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for gpu.json")
    parser.add_argument(
        "--work", type=Path, help="folder for the runs and their logs, kept; by default one that is not"
    )
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if arguments.steps < 2 or arguments.time <= 0:
        parser.error("--steps must be at least 2, and --time more than 0")
    if arguments.accelerator == "cpu" and not arguments.tiny:
        parser.error("--accelerator cpu is there to test this file: use it with --tiny")
    parts = choose(arguments.parts, arguments.only)
    if not parts:
        parser.error(f"--only {arguments.only}: no row has such a name")
    found = probe_machine()
    if arguments.accelerator == "cuda" and found["accelerator"] != "cuda":
        print("torch sees no CUDA device here: there is nothing to measure")
        return
    record = Record("gpu", {"parts": list(parts), "steps": arguments.steps, "tiny": arguments.tiny}, arguments.results)
    record.content["machine"] |= {key: found[key] for key in ("device", "device_memory_gb")}
    with workplace(arguments.work) as work:
        benchmark = Benchmark(arguments.accelerator, arguments.tiny, arguments.steps, work.absolute())
        print(report(run(benchmark, parts, record, arguments.time)))
    print(f"written: {record.path}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["planner"]:
        import planner

        sys.exit(planner.main(sys.argv[2:]))
    main()
