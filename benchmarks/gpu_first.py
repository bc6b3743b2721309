"""The first minutes on a GPU: ``python benchmarks/gpu.py first``. At most eight minutes; ``--dry`` needs no GPU.

In this order, each with a time limit: ``tests/gpu``; races, under compute-sanitizer and as bits of a run whose kernels
wait for each other; whether packed texts reach cuDNN's attention; NF4 against the card's bandwidth; four workloads
beside transformers' Trainer; memory and gradients. What is right or wrong runs a few at once, and what is timed runs
alone. Results are written after every row. A row that fails, lacks a package or has no time left says so.

transformers' Trainer is there for its speed only. Its gradients are not compared: for some models it scales them by the
number of accumulated micro-batches (docs/upstream/transformers-classifiers.md).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from common import Record, environment_here, fit_words, table, workplace
from gpu import Benchmark
from gpu_faults import run_tests
from gpu_judge import MET, NOT_RUN, Found, Measured, figure, judge, read_found
from gpu_rows import CHECKPOINTED, LLAMA_8B, PARTS, QLORA, TINY, VOCABULARY, Row, memory
from gpu_tasks import Task, chosen, command_line, measure, read_arguments
from planner_runs import probe_gpu

from trainer.lab.measured_run import run_trial

HERE = Path(__file__).parent
SECONDS = 470.0
DRY = 3.0
"""Factor on the limits of a dry run, which two processors must do at a time."""
AT_ONCE = 4
"""Rows about what is right or wrong, at a time; two without a GPU."""
NF4_SHARE = 0.5
"""Of the card's bandwidth: the least that the NF4 kernel must reach."""
CUDNN_CACHE = re.compile(r"SDPA Cache Called (\d+) times\. Hit rate: ([\d.]+)")
"""What torch prints for each call of cuDNN's attention where TORCH_CUDNN_SDPA_CACHE_DEBUG is set (MHA.cpp)."""


@dataclass(frozen=True)
class Workload:
    """A model that trains with ours and with transformers' Trainer.

    Args:
        name: in the table.
        recipe: the file in benchmarks/recipes.
        settings: what differs from the recipe, for both.
        unit: what is counted.
        units: of a sample, on average.
        steps: that are timed, after one that is not.
        seconds: limit of each of the two.
        ours: settings of ours only: what transformers' Trainer does not have.
        needs: packages of the other side.
    """

    name: str
    recipe: str
    settings: Mapping[str, Any]
    unit: str
    units: float
    steps: int
    seconds: float
    ours: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


WORKLOADS = [
    Workload(
        "ViT-L/16, bf16-mixed, 64 images",
        "vit_l_16",
        {**memory(64), "batch_size": 64, "data.workers": 4, "data.size": 1024},
        "images",
        1,
        steps=14,
        seconds=30,
    ),
    Workload(
        "DistilBERT, packed, 32 texts of 64 to 512 tokens",
        "distilbert",
        {**memory(32), "batch_size": 64, "model.dropout": "null", "data.shortest": 64},
        "tokens",
        (64 + 512) / 2,
        steps=15,
        seconds=30,
    ),
    Workload(
        "Qwen3-4B, all weights, 8 x 4,096 tokens",
        "language_model",
        {**memory(1, **CHECKPOINTED), "model.name": "Qwen/Qwen3-4B", "batch_size": 8, "data.tokens": 4096},
        "tokens",
        4096,
        steps=2,
        seconds=90,
        ours={"memory.cpu_offload": "optimizer"},
    ),
    Workload(
        "Llama 3.1 8B, QLoRA, 4 x 2 x 2,048 tokens",
        "language_model",
        {**QLORA, **memory(2, "bf16-true"), "model.name": LLAMA_8B, "batch_size": 8, "data.tokens": 2048},
        "tokens",
        2048,
        steps=3,
        seconds=70,
        needs=("bitsandbytes", "peft"),
    ),
]
TINY_UNITS = {"data.tokens": 16, "data.shortest": 8, "batch_size": 4, "memory.micro_batch_size": 2}
RACES = {
    "optimizer and activations offloaded": {"memory.cpu_offload": "optimizer", "memory.activation_offload": "true"},
    "weights streamed, activations offloaded": {
        "memory.cpu_offload": "parameters",
        "memory.activation_offload": "true",
    },
}
TINY_RACE = {"model.hidden": "[16, 16]", "data.image_size": 8, "batch_size": 8, "memory.micro_batch_size": 4}
RACE_STEPS = 12
TOOL = Path("/usr/local/cuda/bin/compute-sanitizer")
SANITIZED = {"memcheck": "nf4", "racecheck": "loss"}
"""Tools of compute-sanitizer, and the kernel that each watches. Codes in NF4 are read at any address, and weights are
stored under a mask: memcheck. The loss reduces through shared memory: racecheck. Neither sees streams."""
PACKED = {
    **memory(16, micro_batch_tokens=4096),
    "model.name": "HuggingFaceTB/SmolLM2-135M",
    "model.padding_free": "true",
    "batch_size": 32,
    "data.tokens": 1024,
    "data.shortest": 64,
}
PACKED_STEPS = 5
MEMORY_ROWS = (
    "exact: optimizer offload, micro-batches of 1",
    "batch 64, 32-true",
    "fp32: optimizer offload, of 8",
    "bf16-mixed, uncapped",
    "exact: parameters streamed, of 2",
)
"""Of the part ``exact``: memory under a target, and gradients against those in fp32."""


@dataclass
class First:
    """What all rows share.

    Args:
        gpu: what :func:`planner_runs.probe_gpu` found; ``None`` for a dry run on a CPU, with small models, which only
            shows that everything works.
        work: a folder for the runs.
    """

    gpu: Mapping[str, Any] | None
    work: Path

    def __post_init__(self) -> None:
        self.is_dry = self.gpu is None
        self.device = "cpu" if self.is_dry else "cuda"
        self.benchmark = Benchmark(self.device, self.is_dry, self.work, self.work)
        self.measured: list[Measured] = []
        self.lock = Lock()

    def groups(self) -> list[tuple[int, list[Task]]]:
        """What is right or wrong, a few at a time, and then what is timed."""
        right = [
            Task("tests/gpu", 110, self.tests),
            *(
                Task(f"{kernel} kernel, compute-sanitizer {tool}", 60, partial(self.sanitized, tool, kernel), True)
                for tool, kernel in SANITIZED.items()
            ),
            *(Task(f"race: {name}", 60, partial(self.race, settings)) for name, settings in RACES.items()),
            Task("packed texts: cuDNN's attention", 60, self.packed),
        ]
        timed = [Task("NF4 to weight, GB/s", 20, self.nf4)]
        for load in WORKLOADS:
            timed += [Task(f"{load.name}: {who}", load.seconds, partial(self.speed, load, who)) for who in WHO]
        rows = {row.name: row for row in PARTS["exact"]}
        timed += [Task(name, rows[name].seconds, partial(self.exact, rows[name])) for name in MEMORY_ROWS]
        return [(2 if self.is_dry else AT_ONCE, right), (2 if self.is_dry else 1, timed)]

    # ------------------------------------------------------------------------------------------------ right or wrong

    def tests(self, seconds: float) -> Found:
        """``tests/gpu`` but for the planner's, the short ones first; without a GPU they are skipped."""
        names = ("nf4", "loss", "unpadded", "monitor", "fit_on_cuda", "tensor_parallel")
        found = sorted((HERE.parent / "tests" / "gpu").glob("test_*.py"))
        known = [path for name in names for path in found if name in path.name]
        files = [path for path in (*known, *found) if path.name != "test_planner.py"]
        words = [str(path.relative_to(HERE.parent)) for path in dict.fromkeys(files)]
        found = run_tests(words, seconds, self.work / "tests.log")
        return {**found, "met": None} if self.is_dry and found["status"] == "finished" else found

    def sanitized(self, tool: str, kernel: str, seconds: float) -> Found:
        """A kernel of ours under a tool of compute-sanitizer."""
        program = shutil.which("compute-sanitizer") or (str(TOOL) if TOOL.is_file() else None)
        if program is None:
            return {"status": NOT_RUN, "reason": "compute-sanitizer is not installed", "met": None}
        out = self.work / f"{tool}.json"
        child = [sys.executable, str(HERE / "gpu_first_runs.py"), "--kind=kernel", f"--out={out}", f"--kernel={kernel}"]
        environment = {**environment_here(), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        command = [program, "--tool", tool, "--error-exitcode", "9", *child]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"status": "late", "reason": f"not finished after {seconds:.0f} s", "met": None}
        said = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "SUMMARY:" in line]
        status = "failed" if done.returncode else "finished"
        shown = {} if status == "finished" else {"output": (done.stdout + done.stderr)[-4000:]}
        reason = said[-1].strip("= ") if said else f"exit code {done.returncode}"
        met = True if status == "finished" else False if done.returncode == 9 else None
        return {"status": status, "reason": reason, **shown, "met": met}

    def race(self, settings: Mapping[str, Any], seconds: float) -> Found:
        """Train with kernels that run ahead, twice, and with ones that the host waits for: the weights must be equal.

        The first two show whether the kernels of the model themselves give the same bits each time.
        """
        small = TINY_RACE if self.is_dry else {}
        runs = {"ahead": "0", "again": "0", "waited for": "1"}
        name = "race-" + "-".join(map(str, settings.values()))

        def run(label: str, blocking: str) -> Found:
            folder = self.work / f"{name}-{label.replace(' ', '-')}"
            steps = 3 if self.is_dry else RACE_STEPS
            arguments = self.arguments("linear_layers", {**settings, **small, "max_steps": steps})
            entry = [str(HERE / "measured_run.py"), f"--out={folder}.json"]
            variables = {"CUDA_LAUNCH_BLOCKING": blocking, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            trial = run_trial(arguments, folder, seconds=seconds, entry=entry, environment=variables, keep_model=True)
            files = sorted((folder / "model").glob("*.safetensors"))
            bits = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else None
            return {"status": trial.status, "reason": trial.reason, "losses": trial.losses, "weights": bits}

        with ThreadPoolExecutor(2 if self.is_dry else len(runs)) as pool:
            found = dict(zip(runs, pool.map(run, runs, runs.values()), strict=True))
        ended = [one for one in found.values() if one["status"] != "finished"]
        if ended:
            return {"status": ended[0]["status"], "reason": ended[0]["reason"], "runs": found, "met": False}
        first, again, waited = (one["weights"] for one in found.values())
        same = first is not None and first == again == waited
        repeats = "equal" if first == again else "not equal: some kernel has no fixed order"
        reason = f"weights: {'equal' if first == waited else 'not equal'}; run twice: {repeats}"
        return {"status": "finished", "reason": reason, "runs": found, "met": same}

    def packed(self, seconds: float) -> Found:
        """A language model on packs of many lengths: no attention may be cuDNN's, which plans for each anew (N2)."""
        folder = self.work / "packed"
        small = {**TINY["language_model"], "data.shortest": 8, "data.tokens": 64} if self.is_dry else {}
        arguments = self.arguments("language_model", {**PACKED, **small, "max_steps": PACKED_STEPS})
        trace = self.work / "packed.trace.gz"
        entry = [str(HERE / "measured_run.py"), f"--out={folder}.json", f"--profile={PACKED_STEPS - 1}"]
        variables = {"TORCH_CUDNN_SDPA_CACHE_DEBUG": "1"}
        trial = run_trial(arguments, folder, seconds=seconds, entry=[*entry, f"--trace={trace}"], environment=variables)
        found: Found = {"status": trial.status, "reason": trial.reason, "plan": trial.plan}
        if trial.status != "finished":
            return {**found, "met": False}
        calls = CUDNN_CACHE.findall(folder.with_suffix(".log").read_text(errors="replace"))
        kernels = attention_kernels(trace) if trace.is_file() else []
        of_cudnn = [name for name in kernels if "cudnn" in name]
        found |= {"cudnn_calls": int(calls[-1][0]) if calls else 0, "kernels": kernels}
        found |= {"hit_rate_percent": float(calls[-1][1]) if calls else None}
        said = f"{found['cudnn_calls']} calls of cuDNN" + (f", {calls[-1][1]} % of them cached" if calls else "")
        seen = f"; kernels: {', '.join(kernels)[:200]}" if kernels else ""
        met = False if calls or of_cudnn else bool(kernels) or None
        return {**found, "reason": said + (seen or "; the trace shows no attention"), "met": met}

    # ---------------------------------------------------------------------------------------------------------- timed

    def nf4(self, seconds: float) -> Found:
        """GB/s of making a weight in NF4 whole."""
        found = self.child("nf4", "nf4", ["--tiny"] if self.is_dry else [], [], seconds)
        if found["status"] != "finished":
            return {**found, "met": False}
        speeds = {name: one["gb_per_second"] for name, one in found.items() if isinstance(one, dict)}
        reason = ", ".join(f"{name} {value:,.0f} GB/s" for name, value in speeds.items())
        if isinstance(found.get("bitsandbytes"), str):
            reason += f"; bitsandbytes: {found['bitsandbytes']}"
        if self.gpu is None:
            return {**found, "reason": reason, "met": None}
        share = speeds.get("kernel", 0.0) * 1e9 / self.gpu["gpu"]["bandwidth"]
        reason += f"; the kernel reaches {share:.0%} of the card's bandwidth"
        return {**found, "share_of_bandwidth": share, "reason": reason, "met": share >= NF4_SHARE}

    def speed(self, load: Workload, who: str, seconds: float) -> Found:
        """Images or tokens a second, and the memory that torch reserved."""
        missing = [name for name in load.needs if who == THEIRS and find_spec(name) is None]
        if missing and not self.is_dry:
            return {"status": NOT_RUN, "reason": f"not installed: {', '.join(missing)}", "met": None}
        settings = {**load.settings, **(load.ours if who == OURS else {}), "max_steps": load.steps + 2}
        steps = load.steps
        if self.is_dry:
            settings = {key: value for key, value in settings.items() if key != "data.workers"} | TINY[load.recipe]
            settings |= {key: value for key, value in TINY_UNITS.items() if key in settings}
            settings |= {"max_steps": 3} | ({"data.size": 64} if "data.size" in settings else {})
            steps = 1
            if missing:  # NF4 of others cannot be tried without its package
                settings |= {"model.lora.base": "full"}
        folder = f"{who}-{load.recipe}-{WORKLOADS.index(load)}"
        options = [f"--who={'ours' if who == OURS else 'transformers'}", f"--steps={steps}"]
        found = self.child("speed", folder, options, self.arguments(load.recipe, settings), seconds)
        if found["status"] != "finished":
            return {**found, "met": None if who != OURS else False}
        rate = int(settings["batch_size"]) * steps * load.units / found["seconds"]
        found |= {"unit": load.unit, "per_second": rate, "reserved_gb": found["peak"] / 1e9}
        return {**found, "reason": f"{rate:,.0f} {load.unit}/s, {found['peak'] / 1e9:.1f} GB reserved", "met": None}

    def exact(self, row: Row, seconds: float) -> Found:
        """A row of the part ``exact``: memory, losses and gradients."""
        self.measured.append(self.benchmark.measure(row, seconds))
        peaks = self.gpu["gpu"]["flops"] if self.gpu else {}
        found = judge(self.measured[-1], self.measured, peaks)
        shown = [f"{found['allocated_gb']:.3f} GB allocated"] if found["allocated_gb"] is not None else []
        shown += [f"gradient {found['difference']['norm']:.1e} off"] if found["difference"] else []
        reason = "; ".join([*found["failures"], *shown]) or found["reason"]
        return {**found, "reason": reason, "met": None if self.is_dry else found["met"]}

    def again(self, rows: Sequence[Found]) -> None:
        """Judge rows of memory anew: a row may have come before the one that it is compared with."""
        peaks = self.gpu["gpu"]["flops"] if self.gpu else {}
        for one in self.measured:
            found = judge(one, self.measured, peaks)
            for row in rows:
                if row["name"] == one.row.name and not self.is_dry:
                    row |= {"difference": found["difference"], "failures": found["failures"], "met": found["met"]}

    # -------------------------------------------------------------------------------------------------------- helpers

    def arguments(self, recipe: str, settings: Mapping[str, Any]) -> list[str]:
        """The words of ``trainer fit`` for a file in benchmarks/recipes."""
        chosen: dict[str, Any] = {"checkpoint.every": "null", **settings}
        if recipe in VOCABULARY:
            with self.lock:  # two threads that import transformers at once break its lazy modules
                chosen["model.tokenizer"] = self.benchmark._tokenizer(100 if self.is_dry else VOCABULARY[recipe])
        return fit_words(recipe, self.device, chosen)

    def child(self, kind: str, name: str, options: Sequence[str], arguments: Sequence[str], seconds: float) -> Found:
        """What a process of ``gpu_first_runs.py`` wrote, and how it ended."""
        folder = self.work / name
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / "rank-0.json"
        entry = [str(HERE / "gpu_first_runs.py"), f"--kind={kind}", f"--out={out}", *options]
        trial = run_trial(arguments, folder / "run", seconds=seconds, entry=entry)
        found = read_found(out)
        status = "failed" if trial.status == "finished" and not found else trial.status
        return {"status": status, "reason": trial.reason, "plan": trial.plan, **found}


OURS, THEIRS = "ours", "transformers' Trainer"
WHO = (OURS, THEIRS)


def attention_kernels(trace: Path) -> list[str]:
    """The kernels in a trace of torch's profiler that look like attention, each once, shortened."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "kernel"}
    return sorted({name[:60] for name in names if re.search(r"flash|sdpa|fmha|attention", name, re.I)})


def report(rows: Sequence[Found]) -> str:
    """Two tables: what is as asked, and speed beside transformers' Trainer."""
    by_name = {row["name"]: row for row in rows}
    timed = {f"{load.name}: {who}" for load in WORKLOADS for who in WHO}
    shown = [
        (row["name"], row["status"], str(row["reason"] or "")[:160], MET[row["met"]])
        for row in rows
        if row["name"] not in timed
    ]
    speeds = []
    for load in WORKLOADS:
        own, other = (by_name.get(f"{load.name}: {who}", {}) for who in WHO)
        both = [one.get("per_second") for one in (own, other)]
        ratio = both[0] / both[1] if both[0] and both[1] else None
        cells = [
            figure(rate, ",.0f") if rate else str(one.get("reason") or one.get("status") or "–")[:60]
            for rate, one in zip(both, (own, other), strict=True)
        ]
        peaks = [figure(one.get("reserved_gb"), ".1f") for one in (own, other)]
        speeds.append((f"{load.name}, {load.unit}/s", *cells, figure(ratio, ".2f"), *peaks))
    header = ("workload", "ours", "transformers' Trainer", "ratio", "GB reserved", "theirs")
    return "\n\n".join([table(("row", "status", "found", "as asked"), shown), table(header, speeds)])


def main(argv: Sequence[str]) -> int:
    """The command line, after the word first; returns the exit code, 1 when a row is not as asked."""
    parser = command_line("first", __doc__, SECONDS)
    parser.add_argument("--dry", action="store_true", help="small models on the CPU, to see that all of it works")
    asked = read_arguments(parser, argv)
    gpu = None if asked.dry else probe_gpu()
    if gpu is None and not asked.dry:
        print("torch sees no CUDA device here: there is nothing to measure; --dry tries it out on the CPU")
        return 0
    name = "gpu_first_dry" if asked.dry else "gpu_first"
    record = Record(name, {"only": asked.only, "dry": asked.dry}, asked.results)
    record.content["gpu"] = gpu
    end = time.monotonic() + asked.time * SECONDS
    with workplace(asked.work) as work:
        first = First(gpu, work.absolute())
        groups = [(at_once, chosen(tasks, asked.only)) for at_once, tasks in first.groups()]
        if not any(tasks for _, tasks in groups):
            parser.error(f"--only {asked.only}: no row has such a name")
        rows = measure(groups, record, end, not asked.dry, asked.time * (DRY if asked.dry else 1), first.again)
    print(report(rows))
    print(f"written: {record.path}")
    return int(any(row["met"] is False for row in rows))
