"""Work of the host in a training step, counted on a simulated GPU: operations, waits, and bytes for each weight.

    python benchmarks/launches.py                     this checkout: two to three minutes on two free cores
    python benchmarks/launches.py --before 8767cb0    beside another commit: twice as long

No GPU is needed: each row is a training step traced on fake CUDA tensors of an H200, with the shipped configurations
of the models at full width. Models of one and two layers are traced. What a layer adds is the difference, and the real
depth is extrapolated from it; one row is also traced at its real depth, which must give the same.

Another commit is measured by the same script, with its own package and race detector (``tests/races``), in a process
of its own. It is checked out in a temporary git worktree, and removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
CHUNK_SECONDS = 50e-6
"""Host time of a carried chunk: an assumption, 40 to 60 us (two waits, two or three copies, an event, a stream)."""
SHALLOW = (1, 2)
"""Layers of the models that are traced."""
SECONDS = 900.0
"""Limit of one checkout; rows that were not measured by then are missing."""
DISTILBERT_WORDS, DISTILBERT_LAYERS = 30_522, 6
TEXTS = (4, 32)
"""Texts of the micro-batches of DistilBERT."""
NF4_SHAPE = (14_336, 4_096)
"""The largest weight of a block of Llama 3.1 8B."""

Found = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A training step.

    Args:
        name: in the table.
        make: a recipe with so many layers, whose files may be written to the folder; with small widths if tiny.
        layers: of the real model.
        whole: whether it is also traced at its real depth.
        offloads: whether gradients go to the host.
    """

    name: str
    make: Callable[[int, Path, bool], Any]
    layers: int
    whole: bool = False
    offloads: bool = False


# ----------------------------------------------------------------------------------------------------------------------
# Recipes. Imports are in functions: the package is that of the checkout that is measured.


def _recipe(model: Any, data: Any, micro_batch_size: int, **memory: Any) -> Any:
    from trainer.recipe import Memory, Optim, Recipe, Run

    knobs = {"precision": "bf16-mixed", "micro_batch_size": micro_batch_size, **memory}
    return Recipe(
        model=model,
        data=data,
        optim=Optim("adamw", lr=1e-4),
        batch_size=2 * micro_batch_size,
        memory=Memory(**knobs),
        run=Run(evaluate=False, predict=False),
    )


def _synthetic() -> Any:
    folder = str(HERE / "recipes")
    if folder not in sys.path:
        sys.path.append(folder)
    import synthetic

    return synthetic


def vit(layers: int, folder: Path, tiny: bool) -> Any:
    """ViT-L/16 at 224 pixels, micro-batches of 64."""
    from trainer.models import VisionTransformer

    shape = {"heads": 2, "width": 64, "mlp_width": 128} if tiny else {"heads": 16, "width": 1024, "mlp_width": 4096}
    pixels = 32 if tiny else 224
    model = VisionTransformer("custom", num_classes=10, image_size=pixels, patch_size=16, layers=layers, **shape)
    return _recipe(model, _synthetic().RandomImages(image_size=pixels, size=256), 2 if tiny else 64)


def _words(folder: Path, tiny: bool) -> Path:
    """A tokenizer with as many words as DistilBERT's."""
    words = folder / "words"
    if not words.exists():
        _synthetic().make_tokenizer(words, 100 if tiny else DISTILBERT_WORDS)
    return words


def distilbert(padding_free: bool | None, texts: int, layers: int, folder: Path, tiny: bool) -> Any:
    """DistilBERT with its dropout, texts of 64 to 512 tokens."""
    from trainer.models import TextClassifier

    width = {"dim": 64, "hidden_dim": 128, "n_heads": 2} if tiny else {}
    config = {"n_layers": layers, **width}
    model = TextClassifier("distilbert", tokenizer=str(_words(folder, tiny)), config=config, padding_free=padding_free)
    lengths = {"tokens": 64, "shortest": 16} if tiny else {"tokens": 512, "shortest": 64}
    return _recipe(model, _synthetic().RandomTexts(**lengths), texts)


def _language_model(name: str, layers: int, tiny: bool, **options: Any) -> Any:
    from trainer.models import CausalLM

    config: Found = {"num_hidden_layers": layers}
    if tiny:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
        config |= {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, **heads}
    return CausalLM(name, tokenizer="none", config=config, **options)


def qwen(layers: int, folder: Path, tiny: bool) -> Any:
    """Qwen3-4B, all weights trained, the optimizer on the host, 4,096 tokens in a micro-batch."""
    model = _language_model("Qwen/Qwen3-4B", layers, tiny)
    offload = {"cpu_offload": "optimizer", "activation_checkpointing": "full"}
    return _recipe(model, _synthetic().RandomTokens(tokens=64 if tiny else 4096), 1, **offload)


def llama(layers: int, folder: Path, tiny: bool) -> Any:
    """Llama 3.1 8B, adapters beside weights in NF4, 2 x 2,048 tokens in a micro-batch."""
    from trainer.models import LoRA

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = _language_model("meta-llama/Llama-3.1-8B", layers, tiny, lora=LoRA(rank=8, targets=targets, base="nf4"))
    knobs = {"precision": "bf16-true", "activation_checkpointing": "full"}
    return _recipe(model, _synthetic().RandomTokens(tokens=64 if tiny else 2048), 2, **knobs)


ROWS: list[Row] = [
    Row("ViT-L/16, bf16-mixed, 64 images", vit, 24),
    *(
        Row(f"DistilBERT, {n} texts, {how}", partial(distilbert, free, n), DISTILBERT_LAYERS, whole=(how, n) == SOLE)
        for SOLE in [("packed", TEXTS[0])]
        for n in TEXTS
        for how, free in (("padded", False), ("packed", None))
    ),
    Row("Qwen3-4B, optimizer offload, 4,096 tokens", qwen, 36, offloads=True),
    Row("Llama 3.1 8B, NF4, 2 x 2,048 tokens", llama, 32),
]
NF4 = "NF4 weight of 14,336 x 4,096 in bf16"


# ----------------------------------------------------------------------------------------------------------------------
# One trace, in a process that has the package of the checkout


@dataclass
class Segment:
    """What the host did between two marks.

    Args:
        phase: forward, backward, step, or after: a backward has ended.
        dispatched: operations of torch, views included, as they leave autograd.
        launched: of them, those that have work for the device: at least a kernel or a copy each.
        thread: operations of the thread that updates weights ahead.
        chunks: copies to the host, of more than a number.
        bus_bytes: over the bus, both ways.
        waits: [what, where, whether only for work from before this micro-step].
    """

    phase: str
    dispatched: int = 0
    launched: int = 0
    thread: int = 0
    chunks: int = 0
    bus_bytes: int = 0
    waits: list[list[Any]] = field(default_factory=list)


COUNTS = ("dispatched", "launched", "thread", "chunks", "bus_bytes")
NO_WORK = {"empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided", "detach"}
NO_WORK |= {"alias", "record_stream", "is_pinned", "_pin_memory", "resize_", "_unsafe_view", "lift_fresh"}


def measure(row: Row, layers: int, tiny: bool, folder: Path) -> Found:
    """Trace steps of two micro-steps; counts of the last one, once everything is set up.

    Returns ``micro_steps``, a list of counts and waits; and ``between``, those from the end of the last backward of a
    step to the first forward of the next. It changes torch for the rest of the process.
    """
    import torch
    from races import configurations, detector
    from races.watched import WatchedTracer
    from torch.utils._pytree import tree_leaves, tree_map

    try:
        from trainer.fakegpu import tracer
        from trainer.fakegpu.events import HOST_STREAM
        from trainer.fakegpu.torch_patches import is_paused
    except ImportError:  # a commit before there was this package
        from trainer.planner.events import HOST_STREAM
        from trainer.planner.fake_patches import is_paused

        from trainer.planner import tracer
    from trainer.memory.plan import decide_plan
    from trainer.planner import traced_run
    from trainer.planner.predict import prepare_recipe

    detector.MACHINERY = (*detector.MACHINERY, __file__)  # a place in a report is a caller's, not this file's
    segments, began, pinned = [Segment("init")], [0], []
    begins: list[int] = []  # the segments before each step

    def mark(phase: str) -> None:
        segments.append(Segment(phase))

    class Waits(detector.Detector):
        def host_waits(self, clock: Any, what: str) -> None:
            before = sum(self.syncs.values())
            super().host_waits(clock, what)
            if sum(self.syncs.values()) > before:  # reads one after another count once
                earlier = all(number <= began[0] for stream, number in clock.items() if stream >= 0)
                segments[-1].waits.append([what, str(detector.here()), earlier])

        def report(self, kind: str, what: str) -> None:
            super().report(kind, what)
            if kind == "pageable copy":  # the driver makes the host wait, though it was asked not to
                segments[-1].waits.append([kind, str(detector.here()), False])

    class Counts(WatchedTracer):
        def enter(self, phase: str) -> None:
            super().enter(phase)
            mark(phase)
            if phase == "forward":
                began[0] = self.detector.operations

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if is_paused() or out is NotImplemented:
                return out
            here = segments[-1]
            if self.host != HOST_STREAM:
                here.thread += self.repeat
                return out
            here.dispatched += self.repeat
            name = func._overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else str(func)
            if getattr(func, "is_view", False) or name in NO_WORK:
                return out
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
            device = [tensor for tensor in tensors if self.is_on_device(tensor)]
            here.launched += self.repeat * bool(device)
            host = [tensor for tensor in tensors if not self.is_on_device(tensor) and tensor.dim()]
            if device and host and "copy" in name:
                here.bus_bytes += self.repeat * host[0].numel() * host[0].element_size()
                target = args[0] if name == "copy_" else out
                here.chunks += self.repeat * (not self.is_on_device(target))
            return out

    configurations.install(Waits())
    tracer.Tracer = traced_run.tracing.__globals__["Tracer"] = Counts

    class Steps(traced_run._FakeStepper):
        def to_device(self, batch: Any) -> Any:
            """From pinned memory what the loader has given, and nothing that was made of it afterwards."""

            def fake(item: Any) -> Any:
                if not isinstance(item, torch.Tensor):
                    return item
                is_pinned = any(item is one for one in pinned)
                made = self.tracer.mode.fake(item.contiguous() if is_pinned else item)  # pinning copies
                if is_pinned:
                    self.tracer.mode.pinned.add(made.untyped_storage())
                return made

            return self.fabric.to_device(tree_map(fake, batch))

    # Older commits took steps in a trace; now it launches them, as a run does.
    name = "launch" if hasattr(traced_run._FakeStepper, "launch") else "step"
    take = getattr(traced_run._FakeStepper, name)

    def taken(stepper: Any, window: Any) -> Any:
        if not begins:  # the first step sets up; those after it show what lies between two
            begins.append(len(segments))
            take(stepper, window)
        begins.append(len(segments))
        return take(stepper, window)

    setattr(Steps, name, taken)
    traced_run._FakeStepper = Steps
    backward = torch.Tensor.backward

    def then_mark(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        mark("after")

    torch.Tensor.backward = then_mark  # type: ignore[method-assign]
    _keep_table()
    recipe = prepare_recipe(row.make(layers, folder, tiny))
    plan = decide_plan(recipe, 1)
    samples = traced_run.draw_samples(recipe, plan)
    for micro in [*samples.first, *samples.longest]:
        loaded = getattr(micro, "packed", None)
        pinned += tree_leaves(micro.batch if loaded is None else loaded)
    traced_run.trace_run(recipe, plan, samples, configurations.TARGET)
    return _steady(segments, begins)


def _steady(segments: Sequence[Segment], begins: Sequence[int]) -> Found:
    """Counts of the last step, and of what is between its first forward and the last backward before."""
    last = segments[begins[-1] :]
    forwards = [number for number, one in enumerate(last) if one.phase == "forward"]
    ends = [number for number, one in enumerate(last) if one.phase == "after"]
    micro_steps = [
        _total(last[begin : next(end for end in ends if end > begin)]) for begin in forwards if begin < ends[-1]
    ]
    before = segments[: begins[-1]]
    ended = max(number for number, one in enumerate(before) if one.phase == "after")
    return {"micro_steps": micro_steps, "between": _total([*before[ended:], *last[: forwards[0]]])}


def _total(segments: Sequence[Segment]) -> Found:
    counts: Found = {name: sum(getattr(one, name) for one in segments) for name in COUNTS}
    return counts | {"waits": [wait for one in segments for wait in one.waits]}


def _keep_table() -> None:
    """Make the table of NF4 once, as a run does; of codes without data the package makes it again and again."""
    from trainer.weights import nf4

    make, made = nf4._pair_table_on, []

    def kept(codes: Any) -> Any:
        if not made:
            made.append(make(codes))
        return made[0]

    nf4._pair_table_on = kept


def measure_nf4(tiny: bool) -> Found:
    """What making one weight whole takes: operations, those with work for the device, and bytes for each weight."""
    import torch
    from races import configurations
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from trainer.planner import traced_run
    from trainer.weights import nf4

    shape = (64, 128) if tiny else NF4_SHAPE
    count = shape[0] * shape[1]
    found: Found = {"dispatched": 0, "launched": 0, "bytes": 0}

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            found["dispatched"] += 1
            name = func._overloadpacket.__name__
            if not func.is_view and name not in NO_WORK:
                tensors = {
                    id(leaf): leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)
                }
                found["launched"] += 1
                found["bytes"] += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            return out

    _keep_table()
    with traced_run.tracing(configurations.TARGET):
        codes = torch.empty(nf4.num_code_rows(count), nf4.BYTES_PER_ROW, dtype=torch.uint8, device="cuda")
        nf4.dequantise(codes, shape, torch.bfloat16)  # whatever is made once
        with Counts():
            nf4.dequantise(codes, shape, torch.bfloat16)
    return {**found, "bytes_per_weight": found["bytes"] / count}


def depths_of(row: Row) -> list[int]:
    """The layers of the models that are traced for a row."""
    return [*SHALLOW, *([row.layers] if row.whole else [])]


def combine(row: Row, traces: Mapping[int, Found]) -> Found:
    """What follows from traces, by layers, for the real depth."""
    few, more = (traces[layers] for layers in SHALLOW)
    found: Found = {"layers": row.layers, "between": _deeper(few["between"], more["between"], row)}
    pairs = zip(few["micro_steps"], more["micro_steps"], strict=True)
    found["micro_steps"] = [_deeper(one, other, row) for one, other in pairs]
    if row.whole:
        seen = traces[row.layers]
        both = zip([*found["micro_steps"], found["between"]], [*seen["micro_steps"], seen["between"]], strict=True)
        found["linear"] = all(one[name] == other[name] for one, other in both for name in COUNTS)
    return found


def _deeper(few: Found, more: Found, row: Row) -> Found:
    """Counts of the real depth, and of a layer; waits are those of the deeper trace, and how many a layer adds."""
    a_layer = {name: (more[name] - few[name]) / (SHALLOW[1] - SHALLOW[0]) for name in COUNTS}
    whole: Found = {name: more[name] + (row.layers - SHALLOW[1]) * a_layer[name] for name in COUNTS}
    added = (len(more["waits"]) - len(few["waits"])) // (SHALLOW[1] - SHALLOW[0])
    number = len(more["waits"]) + (row.layers - SHALLOW[1]) * added
    return whole | {"a_layer": a_layer, "waits": more["waits"], "number_of_waits": number}


def measure_all(words: str, tiny: bool) -> Iterator[tuple[str, Found]]:
    """Row by row; one that cannot be measured in this checkout says why. Each trace is a process of its own."""
    from trainer.system.child_jobs import run_in_children

    began = time.monotonic()
    chosen = [row for row in ROWS if _is_asked(row.name, words)]
    with tempfile.TemporaryDirectory(prefix="launches-") as folder:
        for row in chosen:
            _import(row, Path(folder), tiny)
        ordered = sorted(chosen, key=lambda row: row.offloads)  # which take longest
        places: list[tuple[Row | None, int]] = [(row, layers) for row in ordered for layers in depths_of(row)]
        jobs: list[Callable[[], Any]] = [partial(measure, row, layers, tiny, Path(folder)) for row, layers in places]
        if _is_asked(NF4, words):
            jobs.insert(0, partial(measure_nf4, tiny))
            places.insert(0, (None, 0))
        traces: dict[str, dict[int, Any]] = {row.name: {} for row in chosen}
        for number, result in run_in_children(jobs):
            row, layers = places[number]
            seconds = {"seconds": round(time.monotonic() - began, 1)}
            if row is None:
                yield NF4, (_failed(result) or result) | seconds
                continue
            done = traces[row.name]
            done[layers] = result
            if len(done) == len(depths_of(row)):
                problem = next(filter(None, map(_failed, done.values())), None)
                yield row.name, (problem or combine(row, done)) | seconds


def _import(row: Row, folder: Path, tiny: bool) -> None:
    """Import what a row needs, which takes seconds, before processes are forked for its traces."""
    from trainer.memory.plan import decide_plan
    from trainer.planner import traced_run
    from trainer.planner.predict import prepare_recipe

    recipe = prepare_recipe(row.make(1, folder, tiny))
    traced_run._empty(recipe, decide_plan(recipe, 1))


def _is_asked(name: str, words: str) -> bool:
    return any(word in name for word in words.split(";"))


def _failed(result: Any) -> Found | None:
    return {"failed": f"{type(result).__name__}: {result}"[-500:]} if isinstance(result, Exception) else None


# ----------------------------------------------------------------------------------------------------------------------
# Both checkouts, and the table


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A folder with ``commit``, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="launches-") as folder:
        place = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(place), commit], cwd=ROOT, check=True)
        try:
            yield place
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, check=True)


def measured_by(tree: Path, words: str, tiny: bool, seen: Callable[[dict[str, Found]], None]) -> dict[str, Found]:
    """Rows of a checkout, by a process that has its package; ``seen`` is called with those so far."""
    paths = [str(tree), str(tree / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", *(["--tiny"] if tiny else [])]
    rows: dict[str, Found] = {}
    until = time.monotonic() + SECONDS
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--only", words],
            env={**os.environ, **variables},
            cwd=tree,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            for line in process.stdout or ():
                rows |= json.loads(line)
                name = list(rows)[-1]
                print(f"  {name}: {rows[name].get('failed', 'measured')} (after {rows[name]['seconds']} s)", flush=True)
                seen(rows)
                if time.monotonic() > until:
                    print(f"  the {SECONDS:.0f} s of a checkout are used up: no more rows")
                    break
        finally:
            process.kill()
            process.wait()
        if not rows:
            log.seek(0)
            raise SystemExit(f"{tree}: nothing was measured:\n{log.read()[-3000:]}")
    return rows


def figures(found: Found) -> dict[str, float]:
    """What the table shows of a row; micro-steps differ where only some add to gradients: of the costlier one."""
    if "bytes_per_weight" in found:
        return {"launches a weight": found["launched"], "operations": found["dispatched"]} | {
            "bytes a weight": found["bytes_per_weight"]
        }
    micro = max(found["micro_steps"], key=lambda one: one["dispatched"])
    waits = [wait for one in found["micro_steps"] for wait in one["waits"]]
    numbers = sum(one["number_of_waits"] for one in found["micro_steps"])
    return {
        "operations": micro["dispatched"],
        "launches": micro["launched"],
        "operations a layer": micro["a_layer"]["dispatched"],
        "waits in micro-steps": numbers - sum(wait[2] for wait in waits),
        "waits for earlier work": sum(wait[2] for wait in waits),
        "waits between": found["between"]["number_of_waits"],
        "operations between": found["between"]["dispatched"],
        "chunks": micro["chunks"],
    }


def targets(rows: Mapping[str, Found]) -> list[tuple[str, str, str, bool | None]]:
    """What was asked for: (target, limit, measured, whether it is met; ``None`` where a row is missing)."""
    shown = {name: figures(found) for name, found in rows.items() if "failed" not in found}
    asked: list[tuple[str, str, str, bool | None]] = []

    def ask(what: str, limit: float, value: float | None, form: str = "g") -> None:
        said = "not measured" if value is None else format(value, form)
        asked.append((what, f"at most {limit:g}", said, None if value is None else value <= limit))

    nf4 = shown.get(NF4, {})
    ask("NF4: launches a weight", 1, nf4.get("launches a weight"))
    ask("NF4: bytes a weight", 2.6, nf4.get("bytes a weight"), ".2f")
    for texts in TEXTS:
        pair = [shown.get(f"DistilBERT, {texts} texts, {how}") for how in ("packed", "padded")]
        ratio = pair[0]["operations"] / pair[1]["operations"] if pair[0] and pair[1] else None
        ask(f"DistilBERT, {texts} texts: operations, packed / padded", 1.5, ratio, ".2f")
    for row in ROWS:
        values = shown.get(row.name)
        ask(f"{row.name}: waits in micro-steps", 0, values and values["waits in micro-steps"])
        if not row.offloads:  # there the host must have the gradients before it updates
            ask(f"{row.name}: waits between", 0, values and values["waits between"])
        else:
            chunks = values and values["chunks"] * CHUNK_SECONDS
            ask(f"{row.name}: s of the host in the carrier", 0.05, chunks, ".3f")
    return asked


def report(rows: Mapping[str, Found], before: Mapping[str, Found] | None) -> str:
    """The tables, with the values of another commit beside; and where the host waits."""
    from common import table

    def cell(name: str, key: str) -> str:
        both = [before, rows] if before is not None else [rows]
        found = [one.get(name, {"failed": "not measured"}) for one in both]
        texts = ["–" if "failed" in one else f"{figures(one)[key]:,.4g}" for one in found]
        return " → ".join(texts if len(set(texts)) > 1 else texts[:1])

    named = [row.name for row in ROWS if row.name in rows]
    known = next((figures(rows[name]) for name in named if "failed" not in rows[name]), {})
    parts = [table(("micro-step of", *known), [(name, *(cell(name, key) for key in known)) for name in named])]
    if NF4 in rows and "failed" not in rows[NF4]:
        keys = list(figures(rows[NF4]))
        parts.append(table(("", *keys), [(NF4, *(cell(NF4, key) for key in keys))]))
    old = {what: said for what, _, said, _ in targets(before)} if before is not None else {}
    yes = {True: "yes", False: "no", None: "–"}
    lines = [
        (what, limit, *([old[what]] if before is not None else []), said, yes[met])
        for what, limit, said, met in targets(rows)
        if said != "not measured"
    ]
    if lines:
        header = ("target", "limit", *(["before"] if before is not None else []), "measured", "met")
        parts.append(table(header, lines))
    notes = [f"- {label}{name}: {found['failed']}" for label, name, found in _both(rows, before) if "failed" in found]
    for label, name, found in _both(rows, before):
        notes += [f"- {label}{name}: {line}" for line in _places(found)]
        if found.get("linear") is False:
            notes.append(f"- {label}{name}: the trace of the real depth differs from what was extrapolated")
    return "\n\n".join([*parts, "\n".join(notes)])


def _both(rows: Mapping[str, Found], before: Mapping[str, Found] | None) -> Iterator[tuple[str, str, Found]]:
    for label, some in (("before: ", before or {}), ("", rows)):
        yield from ((label, name, found) for name, found in some.items())


def _places(found: Found) -> list[str]:
    """Where the host waits in a step."""
    named = [("between", found.get("between", {}))] + [("micro-step", one) for one in found.get("micro_steps", ())]
    lines = [
        f"waits {'for earlier work' if earlier else ''} ({where}): {what} at {place}".replace("  ", " ")
        for where, one in named
        for what, place, earlier in one.get("waits", ())
    ]
    return list(dict.fromkeys(lines))


def main() -> int:
    """The command line; the exit code is 1 where a target is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="a commit to show beside")
    parser.add_argument("--only", default="", help="rows whose name contains one of these words, with semicolons")
    parser.add_argument("--tiny", action="store_true", help="small widths, to try this file")
    parser.add_argument("--results", type=Path, help="folder for launches.json; benchmarks/results by default")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        import races.configurations  # noqa: F401 - once, before processes are forked

        for name, found in measure_all(asked.only, asked.tiny):
            print(json.dumps({name: found}), flush=True)
        return 0
    from common import RESULTS, Record

    settings = {"before": asked.before, "only": asked.only, "tiny": asked.tiny, "chunk_seconds": CHUNK_SECONDS}
    record = Record("launches", settings | {"layers_traced": SHALLOW, "card": "h200"}, asked.results or RESULTS)
    before = None
    if asked.before:
        print(f"before ({asked.before}):", flush=True)
        with checkout(asked.before) as tree:
            before = measured_by(tree, asked.only, asked.tiny, lambda rows: record.write(before=rows))
    print("now:", flush=True)
    rows = measured_by(ROOT, asked.only, asked.tiny, lambda rows: record.write(rows=rows))
    record.write(complete=True, rows=rows, targets=targets(rows), **({"before": before} if before else {}))
    print(report(rows, before))
    print(f"written: {record.path}")
    return int(any(met is False for *_, met in targets(rows)))


if __name__ == "__main__":
    sys.exit(main())
