"""One GPU: how little memory exact training takes, whether its gradients are right, and how fast it is.

    python benchmarks/gpu.py first               tests, races, kernels, speed beside transformers' Trainer, memory,
                                                 gradients: 8 minutes, see gpu_first.py; --dry needs no GPU
    python benchmarks/gpu.py exact               the headline rows, gradients against fp32, speed, caps: 8 minutes
    python benchmarks/gpu.py planner             predicted against measured memory: 8 minutes, see planner_gpu.py
    python benchmarks/gpu.py faults              resume, recovery, out of memory, tests/gpu: 8 minutes
    python benchmarks/gpu.py lm                  language models of 4 and 8 billion weights, memory and speed: 8 minutes
    python benchmarks/gpu.py ladder caps text    the published ladder and more of each, 10 minutes

Every row is a run in a fresh process, with random weights and data made in memory: nothing is downloaded, and no model
is written. Results are written after every row; a row that fails, or that there is no time for, is a row that says so.
``--predict h200`` needs no GPU: it predicts the memory of every row instead of measuring it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common import RESULTS, Record, fit_words, resolve, workplace
from gpu_judge import NOT_RUN, Measured, judge, read_found, report
from gpu_rows import LEFT_OUT, PART_SECONDS, PARTS, TINY, VOCABULARY, Row
from gpu_tasks import MIN_SECONDS, read_arguments
from planner_runs import file_name, probe_gpu

from trainer.lab.measured_run import Trial, run_trial

HERE = Path(__file__).parent
TRACE = "gpu_trace.json.gz"
TINY_STEPS = 4
TO_END = 10.0
"""Seconds before the limit of a row by which it ends by itself, with what it has."""


@dataclass
class Benchmark:
    """What all rows share.

    Args:
        device: cuda or cpu.
        tiny: whether models are small.
        work: a folder for the runs.
        traces: the folder for the trace of the first row of speed.
    """

    device: str
    tiny: bool
    work: Path
    traces: Path
    tokenizers: dict[int, Path] = field(default_factory=dict)
    traced: bool = False

    def measure(self, row: Row, seconds: float) -> Measured:
        """Run ``row``, for at most so many seconds."""
        if self.device == "cpu" and row.cap_gb is not None:
            return Measured(row, Trial(NOT_RUN, "needs a GPU", [], 0.0))
        run_dir = self.work / file_name(row.name)
        out = run_dir.with_suffix(".json")
        steps = min(row.steps, TINY_STEPS) if self.tiny else row.steps
        try:
            arguments = self._arguments(row, steps)
        except Exception as error:  # a package that is missing here is one row's misfortune
            return Measured(row, Trial("failed", f"{type(error).__name__}: {error}", [], 0.0))
        entry = [str(HERE / "measured_run.py"), f"--out={out}", f"--profile={steps - 1}"]
        entry.append(f"--until={time.time() + seconds - TO_END:.1f}")
        entry += [f"--cap={row.cap_gb}"] if row.cap_gb is not None else []
        entry += ["--flops"] if row.speed else []
        if row.speed and self.device == "cuda" and not self.traced:
            self.traced = True
            self.traces.mkdir(parents=True, exist_ok=True)
            entry.append(f"--trace={self.traces / TRACE}")
        trial = run_trial(arguments, run_dir, seconds=seconds, entry=entry, environment=row.environment)
        gradients = out.with_suffix(".safetensors")
        return Measured(row, trial, read_found(out), gradients if gradients.is_file() else None)

    def _arguments(self, row: Row, steps: int) -> list[str]:
        settings = {"max_steps": steps, **row.settings}
        if self.tiny:
            settings = {key: value for key, value in settings.items() if key not in LEFT_OUT} | TINY[row.recipe]
        if row.recipe in VOCABULARY:
            settings["model.tokenizer"] = self._tokenizer(100 if self.tiny else VOCABULARY[row.recipe])
        return fit_words(row.recipe, self.device, settings)

    def _tokenizer(self, words: int) -> Path:
        """A folder with a tokenizer of so many words."""
        if words not in self.tokenizers:
            sys.path.insert(0, str(HERE / "recipes"))
            from synthetic import make_tokenizer

            self.tokenizers[words] = make_tokenizer(self.work / f"tokenizer-{words}", words)
        return self.tokenizers[words]


def run(
    measure: Callable[[Row, float], Measured],
    parts: Mapping[str, list[Row]],
    record: Record,
    factor: float = 1.0,
    peaks: Mapping[str, float] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Measure part by part, each within its time, and write after every row; all rows are judged anew with each.

    Args:
        measure: runs a row, for at most so many seconds.
        parts: rows by part.
        record: what is written.
        factor: on the time that each part may take.
        peaks: the GPU's dense operations a second, by type.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in parts}
    record.write(parts=results)
    for name, rows in parts.items():
        end = time.monotonic() + factor * PART_SECONDS[name]
        measured: list[Measured] = []
        for number, row in enumerate(rows, 1):
            print(f"{name} {number}/{len(rows)}: {row.name} ...", flush=True)
            left = end - time.monotonic()
            if left < MIN_SECONDS:
                late = f"late: the {factor * PART_SECONDS[name]:.0f} s of this part are used up"
                measured.append(Measured(row, Trial(NOT_RUN, late, [], 0.0)))
            else:
                measured.append(measure(row, min(left, factor * row.seconds)))
            # A row may have come before the one that it is compared with.
            results[name] = [judge(one, measured, peaks or {}) for one in measured]
            record.write(parts=results)
            trial = measured[-1].trial
            print(f"  {trial.status} in {trial.seconds:.0f} s: {trial.reason or trial.plan}", flush=True)
    record.write(complete=True, parts=results)
    return results


def predict(benchmark: Benchmark, parts: Mapping[str, list[Row]], gpu: str, record: Record) -> None:
    """Predict what each row takes of a GPU that is not there, beside its target; print and write it."""
    from trainer.memory.plan import decide_plan
    from trainer.planner.predict import Prediction, predict_in_process, prepare_recipe
    from trainer.planner.search import target_for
    from trainer.system.child_jobs import run_in_child

    found: list[dict[str, Any]] = []
    for name, row in [(name, row) for name, rows in parts.items() for row in rows]:
        recipe = prepare_recipe(resolve(benchmark._arguments(row, row.steps)))
        plan, target = decide_plan(recipe, 1), target_for(gpu)
        answer = Prediction.from_child(run_in_child(partial(predict_in_process, recipe, plan, target)))
        sizes = {kind: round(getattr(answer, kind) / 1e9, 3) for kind in ("allocated", "reserved", "host")}
        largest = [f"{operation} in {phase} {size / 1e9:.2f} GB" for _, operation, phase, size in answer.largest[:5]]
        goal = row.limit_gb and f"{row.target[0]} {row.limit_gb:.2f} GB" if row.target else "none"
        print(f"{name}: {row.name}: {sizes}, at most {goal}; at the peak: {', '.join(largest)}", flush=True)
        found.append({"part": name, "name": row.name, "limit": goal, "plan": plan.describe(), **sizes})
        found[-1] |= {"phase": answer.peak_phase, "largest": largest, "step_ms": round(answer.cost.step_ms)}
        record.write(name == list(parts)[-1] and row is parts[name][-1], rows=found)


def choose(parts: list[str], only: str | None) -> dict[str, list[Row]]:
    """The parts asked for; with ``only`` rows whose name contains one of its words, and references."""
    chosen = {name: PARTS[name] for name in PARTS if name in parts}
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


def main() -> int:
    """The command line; returns the exit code, 1 when a row has not what was asked of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; exact by default")
    parser.add_argument("--only", help="rows whose name contains one of these words, with commas")
    parser.add_argument("--time", type=float, default=1.0, help="factor on the time that each part and row may take")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for gpu_PARTS.json and the trace")
    parser.add_argument(
        "--work", type=Path, help="folder for the runs and their logs, kept; by default one that is not"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries out this file, with --tiny"
    )
    parser.add_argument("--predict", metavar="GPU", help="predict for this GPU, such as h200; none is needed")
    parser.add_argument("--tiny", action="store_true", help="small models, whose figures mean nothing")
    asked = read_arguments(parser, sys.argv[1:])
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(
            f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}; or alone first, planner, faults"
        )
    parts = choose(asked.parts or ["exact"], asked.only)
    if not parts:
        parser.error(f"--only {asked.only}: no row has such a name")
    if asked.predict:
        options = {"parts": list(parts), "only": asked.only, "gpu": asked.predict}
        record = Record("_".join(["gpu", *parts, "predicted"]), options, asked.results)
        with workplace(asked.work) as work:
            here = Benchmark("cuda", asked.tiny, work.absolute(), asked.results.absolute())
            predict(here, parts, asked.predict, record)
        return 0
    gpu = probe_gpu() if asked.device == "cuda" else None
    if asked.device == "cuda" and gpu is None:
        print("torch sees no CUDA device here: there is nothing to measure")
        return 0
    record = Record(
        "_".join(["gpu", *parts]), {"parts": list(parts), "only": asked.only, "tiny": asked.tiny}, asked.results
    )
    record.content["gpu"] = gpu
    with workplace(asked.work) as work:
        benchmark = Benchmark(asked.device, asked.tiny, work.absolute(), asked.results.absolute())
        results = run(benchmark.measure, parts, record, asked.time, gpu["gpu"]["flops"] if gpu else {})
    print(report(results))
    print(f"written: {record.path}")
    return int(any(row["met"] is False for rows in results.values() for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["first"]:
        import gpu_first

        sys.exit(gpu_first.main(sys.argv[2:]))
    if sys.argv[1:2] == ["planner"]:
        import planner_gpu

        sys.exit(planner_gpu.main(sys.argv[2:]))
    if sys.argv[1:2] == ["faults"]:
        import gpu_faults

        sys.exit(gpu_faults.main(sys.argv[2:]))
    sys.exit(main())
