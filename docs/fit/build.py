"""Build the page "Will it fit?" (docs/planner/fit.md): trace the models of ``models.py``, and write ``index.html``.

    python docs/fit/build.py                  trace all models, then write the page: about 40 minutes of one core
    python docs/fit/build.py --only llama     trace only models whose name contains "llama", then write the page
    python docs/fit/build.py --minutes 0      write the page with what is traced

The file of a model keeps what was traced, so an interrupted build continues where it was; a template is traced again if
its configuration or torch has changed. Templates are those of the installed torch, on a simulated A100.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import re
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import peft  # noqa: F401
import torch
import torchao  # noqa: F401
import torchvision  # noqa: F401
import transformers
from models import ENCODERS, IMAGES, LARGE_DECODERS, SMALL_DECODERS

import trainer.models.packed_attention
import trainer.models.padding_free  # noqa: F401  # imported once here instead of in each child
from trainer.commands.fit_page import data_script, write_fit_page
from trainer.contract import without_weights
from trainer.errors import RunError
from trainer.fakegpu.events import Event, Operation, Trace
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.snapshot import event_columns
from trainer.fakegpu.target import Target
from trainer.memory.plan import Plan, decide_plan
from trainer.models.lora import LoRA
from trainer.planner.hub_config import hub_recipe
from trainer.planner.knobs import apply_settings
from trainer.planner.predict import prepare_recipe
from trainer.planner.search import with_size
from trainer.planner.traced_run import draw_samples, trace_run
from trainer.recipe import Recipe
from trainer.system.child_jobs import run_in_children
from trainer.weights.streaming import on_meta

DATA = Path(__file__).parent / "data"
TRACED = "a100-80gb"  # the card of the traces
MICRO_STEPS = 2  # the page derives one micro-step from two, see Events.whole in template.js

Flags = dict[str, Any]
MIXED: Flags = {"memory.precision": "bf16-mixed"}
HALF: Flags = {"memory.precision": "bf16-true", "memory.stochastic_rounding": True}
FULL: Flags = {"memory.activation_checkpointing": "full"}
IN_8_BITS: Flags = {"memory.optimizer_state_bits": 8}
ADAPTERS: Flags = {"memory.precision": "bf16-true", "memory.cpu_offload": "optimizer", "lora": 16}
NF4: Flags = {"model.lora.base": "nf4"}


class Combination(NamedTuple):
    """A combination of techniques at one length of the input, with the micro-batches to trace for its template."""

    tokens: int | None
    flags: Flags
    least: int  # smallest micro-batch of the template
    sizes: tuple[int, ...]
    pieces: int = 0  # parts of the loss of a language model; their number must not depend on the micro-batch


def texts(*every: tuple[int, Flags, int, tuple[int, ...]], pieces: int = 0) -> list[Combination]:
    return [Combination(*one, pieces) for one in every]


# The first combination of every model is traced first, then the second, and so on. No template of texts crosses 3,072
# tokens, because torch sums the gradient of an embedding in another way above them.
GROUPS = {
    "images": (
        *("image-classification", IMAGES),
        [Combination(None, flags, 2, (2, 128)) for flags in (MIXED, MIXED | FULL, MIXED | FULL | IN_8_BITS)],
    ),
    "text classifiers": (
        *("sequence-classification", ENCODERS),
        texts(
            *((512, MIXED, 7, (8, 64)), (512, MIXED | FULL, 7, (8, 64)), (128, MIXED, 25, (32, 256))),
            (512, MIXED | FULL | IN_8_BITS, 7, (8, 64)),
        ),
    ),
    "language models to 2 B": (
        *("causal-lm", SMALL_DECODERS),
        texts(
            *((1024, MIXED | FULL, 1, (1,)), (1024, ADAPTERS | FULL, 1, (1,)), (1024, MIXED | FULL, 4, (4, 16))),
            *((1024, ADAPTERS | FULL, 4, (4, 16)), (1024, MIXED, 4, (4, 16)), (1024, MIXED, 1, (1,))),
            pieces=3,
        ),
    ),
    "language models from 2 B": (
        *("causal-lm", LARGE_DECODERS),
        texts(
            *((2048, ADAPTERS | FULL, 1, (1,)), (2048, HALF | FULL | IN_8_BITS, 1, (1,))),
            *((2048, ADAPTERS | NF4 | FULL, 1, (1,)), (2048, ADAPTERS | FULL, 2, (2, 8))),
            *((2048, HALF | FULL | IN_8_BITS, 2, (2, 8)), (2048, ADAPTERS | NF4 | FULL, 2, (2, 8))),
            pieces=23,
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="trace only models whose name contains this text")
    parser.add_argument(
        "--group", default="", help="trace only groups whose name contains one of these texts, with commas"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no trace after this time; 0: none")
    asked = parser.parse_args()
    end = time.time() + 60 * asked.minutes
    DATA.mkdir(exist_ok=True)
    models = [Published(name, group, *GROUPS[group]) for group in GROUPS for name in GROUPS[group][1]]
    wanted = [
        one
        for one in models
        if asked.only.lower() in one.name.lower() and any(part in one.group for part in asked.group.split(","))
    ]
    if not wanted:
        parser.error(f"no model of --group {asked.group!r} has {asked.only!r} in its name")
    for place in range(max(len(one.combinations) for one in wanted)):
        for one in wanted:
            began = time.time()
            if began < end and one.trace(one.combinations[place : place + 1]):
                print(f"{one.name}: {one.path.stat().st_size:,} bytes, {time.time() - began:.0f} s", flush=True)
    listed = [one.listing for one in models if one.path.exists()]
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    write_fit_page(
        DATA.parent / "index.html", {"models": listed, "traced": gpu_named(TRACED).title, "versions": versions}
    )


@dataclass(frozen=True)
class Published:
    """A published model, and the combinations that the page has of it."""

    name: str
    group: str
    task: str
    configurations: dict[str, Flags]
    combinations: list[Combination]

    @property
    def path(self) -> Path:
        return DATA / f"{self.name.replace('/', '--')}.js"

    @property
    def listing(self) -> dict[str, str]:
        return {"name": self.name, "group": self.group, "task": self.task, "file": f"data/{self.path.name}"}

    @property
    def whole(self) -> bool:
        """Whether a batch must not be cut: BatchNorm then computes something else."""
        return self.configurations[self.name]["model_type"] == "resnet"

    def trace(self, combinations: Sequence[Combination]) -> bool:
        """Trace what the model's file lacks of ``combinations``, and write it; return whether one was traced."""
        found = {plan["key"]: plan for plan in self.stored()}
        new = [one for one in combinations if self.key(one) not in found]
        for one in new:
            if (template := self.template(one)) is not None:
                found[self.key(one)] = {"key": self.key(one), **template}
        keys = [self.key(one) for one in self.combinations]
        self.path.write_text(data_script(self.name, [found[key] for key in keys if key in found]))
        return bool(new)

    def stored(self) -> list[dict[str, Any]]:
        """Return the templates in the model's file."""
        packed = re.findall(r', "([^"]*)"\);', self.path.read_text()) if self.path.exists() else []
        return [plan for text in packed for plan in json.loads(zlib.decompress(base64.b64decode(text)))]

    def key(self, one: Combination) -> str:
        """Return a text that changes when a template must be traced again."""
        inputs = json.dumps([self.configurations[self.name], one, self.whole, torch.__version__.partition("+")[0]])
        return hashlib.sha256(inputs.encode()).hexdigest()[:16]

    def template(self, one: Combination) -> dict[str, Any] | None:
        """Return the template of a combination; print why, and return ``None``, if it cannot be traced."""
        chunk = (one.tokens - 1) // one.pieces if one.tokens and one.pieces else None
        memory = {key: value for key, value in one.flags.items() if key.startswith("memory.")}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(self.configurations[self.name]))
            steps = 1 if self.whole else MICRO_STEPS
            recipes = {size: recipe_of(folder, self.task, one, size, steps, chunk) for size in one.sizes}
            on_meta(without_weights(recipes[one.sizes[0]].model).build)  # imports once what every trace needs
            try:
                columns = trace_columns(recipes, memory, Target(gpu_named(TRACED)))
            except RunError as error:
                print(f"{self.name} {one}: {error}", flush=True)
                return None
        if columns is None:
            print(f"{self.name} {one}: the events of the two micro-batches differ", flush=True)
            return None
        about = {"flags": one.flags, "tokens": one.tokens, "least": one.least, "single": self.whole}
        return {**about, "loss_chunk": chunk, **columns}


def recipe_of(folder: str, task: str, one: Combination, size: int, micro_steps: int, chunk: int | None) -> Recipe:
    """Return the prepared recipe of a batch of ``micro_steps`` micro-batches of ``size``."""
    recipe = hub_recipe(folder, task, one.tokens, size * micro_steps, one.flags.get("lora", 0))
    if "model.lora.base" in one.flags:
        lora = LoRA(one.flags["lora"], base=one.flags["model.lora.base"])
        recipe = recipe.replace(model=replace(recipe.model, lora=lora))
    if chunk:
        recipe = recipe.replace(model=replace(recipe.model, loss_chunk=chunk * size))
    return prepare_recipe(recipe, outlines=True)


def trace_columns(recipes: Mapping[int, Recipe], settings: Flags, target: Target) -> dict[str, Any] | None:
    """Return the columns of prepared ``recipes`` by micro-batch with ``settings``; ``None`` if their events differ."""
    runs = [apply_settings(recipe, with_size(settings, size)) for size, recipe in recipes.items()]
    found = dict(run_in_children([partial(traced, run, decide_plan(run, 1), target) for run in runs], 1))
    for answer in found.values():
        if isinstance(answer, Exception):
            raise RunError(f"a plan cannot be traced: {answer}") from answer
    traces = {size: as_trace(found[place]) for place, size in enumerate(recipes)}
    return event_columns(traces) if len({outline(one) for one in traces.values()}) == 1 else None


def outline(trace: Trace) -> str:
    """Return everything but sizes."""
    events = [(*one[:1], *one[2:], one.bytes > 0) for one in trace.events]
    return repr((events, [one[:4] for one in trace.work], trace.categories, trace.marks, trace.micro_steps))


def traced(recipe: Recipe, plan: Plan, target: Target) -> Flags:
    """Return the fields of a trace that the page needs; it changes torch for the rest of the process."""
    trace = trace_run(recipe, plan, draw_samples(recipe, plan), target)
    names = ("events", "work", "categories", "marks", "micro_steps")
    return {name: field for name, field in vars(trace).items() if name in names}


def as_trace(fields: Flags) -> Trace:
    """Rebuild a trace from JSON, whose keys are texts and whose records are lists."""
    categories = {int(block): category for block, category in fields["categories"].items()}
    records = {"events": [Event(*one) for one in fields["events"]], "work": [Operation(*one) for one in fields["work"]]}
    return Trace(**{**fields, **records, "categories": categories})


if __name__ == "__main__":
    main()
