"""Build the page "Will it fit?" (docs/planner/fit.md): trace the models of ``models.py``, and write ``index.html``.

    python docs/fit/build.py                  trace all models, then write the page: about 40 minutes of one core
    python docs/fit/build.py --only llama     trace only models whose name contains "llama", then write the page

Each template is written to ``traces/`` when it is traced, so an interrupted build continues where it was. Templates are
those of the installed torch, on a simulated A100.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft  # noqa: F401
import torch
import torchao  # noqa: F401
import torchvision  # noqa: F401
import transformers
from models import ENCODERS, IMAGES, LARGE_DECODERS, SMALL_DECODERS

import trainer.models.packed_attention
import trainer.models.padding_free  # noqa: F401  # imported once here instead of in each child
from trainer.commands.fit_page import data_script, trace_columns, write_fit_page
from trainer.contract import without_weights
from trainer.errors import RunError
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.models.lora import LoRA
from trainer.planner.hub_config import hub_recipe
from trainer.planner.predict import prepare_recipe
from trainer.recipe import Recipe
from trainer.weights.streaming import on_meta

DATA = Path(__file__).parent / "data"
TRACES = DATA.parent / "traces"  # one file a template, not in the repository
TRACED = "a100-80gb"  # the card of the traces
MICRO_STEPS = 2  # the page derives one micro-step from two, see Events.whole in template.js

Flags = dict[str, Any]
MIXED: Flags = {"memory.precision": "bf16-mixed"}
HALF: Flags = {"memory.precision": "bf16-true", "memory.stochastic_rounding": True}
FULL: Flags = {"memory.activation_checkpointing": "full"}
IN_8_BITS: Flags = {"memory.optimizer_state_bits": 8}
ADAPTERS: Flags = {"memory.precision": "bf16-true", "memory.cpu_offload": "optimizer", "lora": 16}
NF4: Flags = {"model.lora.base": "nf4"}
USUAL = [MIXED, MIXED | FULL, MIXED | FULL | IN_8_BITS]


@dataclass(frozen=True)
class Length:
    """A length of the input, with the micro-batches to trace: each tuple is a template, valid from its first number.

    torch sums the gradient of an embedding in another way above 3,072 tokens, so no template crosses this number."""

    tokens: int | None
    flags: list[Flags]
    sizes: list[tuple[int, tuple[int, ...]]]  # (smallest micro-batch, traced micro-batches)
    pieces: int = 0  # parts of the loss of a language model; their number must not depend on the micro-batch


GROUPS = {
    "images": ("image-classification", IMAGES, [Length(None, USUAL, [(2, (2, 128))])]),
    "text classifiers": (
        *("sequence-classification", ENCODERS),
        [Length(512, USUAL, [(7, (8, 64))]), Length(128, [MIXED], [(25, (32, 256))])],
    ),
    "language models to 2 B": (
        *("causal-lm", SMALL_DECODERS),
        [Length(1024, [MIXED | FULL, ADAPTERS | FULL, MIXED], [(1, (1,)), (4, (4, 16))], 3)],
    ),
    "language models from 2 B": (
        *("causal-lm", LARGE_DECODERS),
        [Length(2048, [ADAPTERS | NF4 | FULL, HALF | FULL | IN_8_BITS, ADAPTERS | FULL], [(1, (1,)), (2, (2, 8))], 23)],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="trace only models whose name contains this text")
    parser.add_argument("--group", default="", help="trace only groups whose name contains this text")
    asked = parser.parse_args()
    for folder in (DATA, TRACES):
        folder.mkdir(exist_ok=True)
    models = [Published(name, group, *GROUPS[group]) for group in GROUPS for name in GROUPS[group][1]]
    wanted = [one for one in models if asked.only.lower() in one.name.lower() and asked.group in one.group]
    for place in range(max(len(length.flags) for one in wanted for length in one.lengths)):  # the first ones of all first
        for one in wanted:
            began = time.time()
            if one.trace(place):
                print(f"{one.name}: {one.path.stat().st_size:,} bytes, {time.time() - began:.0f} s", flush=True)
    listed = [one.listing for one in models if one.path.exists()]
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    write_fit_page(DATA.parent / "index.html", {"models": listed, "traced": gpu_named(TRACED).title, "versions": versions})


@dataclass(frozen=True)
class Published:
    """A published model, and the combinations that the page has of it."""

    name: str
    group: str
    task: str
    configurations: dict[str, Flags]
    lengths: list[Length]

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

    def trace(self, place: int) -> bool:
        """Trace the combinations at ``place`` and write all that are known; return whether one was traced."""
        new = False
        for length in self.lengths:
            for flags in length.flags[place : place + 1]:
                for least, sizes in length.sizes:
                    if not self.stored(length, flags, sizes).exists():
                        found = self.template(length, flags, least, sizes)
                        self.stored(length, flags, sizes).write_text(json.dumps(found))
                        new = True
        known = [
            self.stored(length, flags, sizes)
            for length in self.lengths
            for flags in length.flags
            for _, sizes in length.sizes
        ]
        found = [json.loads(path.read_text()) for path in known if path.exists()]
        self.path.write_text(data_script(self.name, [one for one in found if one is not None]))
        return new

    def stored(self, length: Length, flags: Flags, sizes: tuple[int, ...]) -> Path:
        """Return the file of a template, whose name changes when it must be traced again."""
        inputs = [self.configurations[self.name], length.tokens, length.pieces, flags, sizes, self.whole]
        digest = hashlib.sha256(json.dumps([*inputs, torch.__version__.partition("+")[0]]).encode())
        return TRACES / f"{self.path.stem}-{digest.hexdigest()[:16]}.json"

    def template(self, length: Length, flags: Flags, least: int, sizes: tuple[int, ...]) -> dict[str, Any] | None:
        """Return the template of a combination; print why, and return ``None``, if it cannot be traced."""
        chunk = (length.tokens - 1) // length.pieces if length.tokens and length.pieces else None
        memory = {key: value for key, value in flags.items() if key.startswith("memory.")}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(self.configurations[self.name]))
            steps = 1 if self.whole else MICRO_STEPS
            recipes = {size: recipe_of(folder, self.task, length.tokens, flags, size, steps, chunk) for size in sizes}
            on_meta(without_weights(recipes[sizes[0]].model).build)  # imports once what every trace needs
            try:
                columns = trace_columns(recipes, memory, Target(gpu_named(TRACED)))
            except RunError as error:
                print(f"{self.name} {flags}: {error}", flush=True)
                return None
        if columns is None:
            print(f"{self.name} {flags}: the events of micro-batches {sizes} differ", flush=True)
            return None
        about = {"flags": flags, "tokens": length.tokens, "least": least, "single": self.whole, "loss_chunk": chunk}
        return {**about, **columns}


def recipe_of(
    folder: str, task: str, tokens: int | None, flags: Flags, size: int, micro_steps: int, chunk: int | None
) -> Recipe:
    """Return the prepared recipe of a batch of ``micro_steps`` micro-batches of ``size``."""
    recipe = hub_recipe(folder, task, tokens, size * micro_steps, flags.get("lora", 0))
    if "model.lora.base" in flags:
        recipe = recipe.replace(model=replace(recipe.model, lora=LoRA(flags["lora"], base=flags["model.lora.base"])))
    if chunk:
        recipe = recipe.replace(model=replace(recipe.model, loss_chunk=chunk * size))
    return prepare_recipe(recipe, outlines=True)


if __name__ == "__main__":
    main()
