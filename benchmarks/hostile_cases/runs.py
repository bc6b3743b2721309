"""Run directories, checkpoints, and inputs of ``predict``."""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from hostile_cases.case import (
    ANY,
    CODE,
    ESC,
    FIT,
    RAN,
    REFUSED,
    Case,
    done,
    picture,
    replaced,
    wrote,
)

STEP = "run/checkpoints/step-00000002"
RESUME = [*FIT, "--run.dir", "run", "--run.resume", "auto", "--max_steps", "3", "--run.allow_change", "[max_steps]"]
LIST, VERIFY, EXPORT = (["checkpoint", action, "run"] for action in ("list", "verify", "export"))
EVALUATE, PREDICT = ["evaluate", "run"], ["predict", "run", "--image", "i.png"]


def forge(**changes: Any) -> None:
    """A manifest with ``changes``, and the hash that belongs to it."""
    from trainer.checkpoint.manifest import read_manifest

    manifest = dataclasses.replace(read_manifest(Path(STEP)), **changes)
    Path(STEP, "manifest.json").write_text(manifest.to_json())


def _entry(name: str, size: int = 8, sha256: str = "0" * 64) -> None:
    from trainer.checkpoint.manifest import read_manifest

    forge(files=dict(read_manifest(Path(STEP)).files) | {name: {"bytes": size, "sha256": sha256}})


def _said(name: str, text: str | bytes) -> None:
    """Other content of a file of the checkpoint, with the size and hash that belong to it."""
    raw = text if isinstance(text, bytes) else text.encode()
    _entry(name, len(raw), hashlib.sha256(raw).hexdigest())
    Path(STEP, name).write_bytes(raw)


def _link(target: str) -> Callable[[str], None]:
    return partial(os.symlink, target)


RUNS: list[tuple[str, Callable[[], Any], list[str], str]] = [
    ("summary.json is garbage", lambda: wrote("run/summary.json", b"\xff\0", []), RESUME, ANY),
    ("recipe.yaml is garbage", lambda: wrote("run/recipe.yaml", b"\xff\0", []), EVALUATE, REFUSED),
    ("recipe.yaml names a recipe that is gone", lambda: wrote("run/recipe.yaml", "recipe: /nowhere/own.py", []), EVALUATE, REFUSED),
    ("recipe.yaml names code in the folder", lambda: (wrote("run/recipe.yaml", "recipe: evil.py", []), wrote("run/evil.py", CODE, [])), PREDICT, REFUSED),
    ("recipe.yaml names code by ..", lambda: (wrote("run/recipe.yaml", "recipe: ../run/evil.py", []), wrote("run/evil.py", CODE, [])), EVALUATE, REFUSED),
    ("recipe.yaml is a named pipe", lambda: replaced("run/recipe.yaml", os.mkfifo), EVALUATE, REFUSED),
    ("recipe.yaml is a link to /dev/zero", lambda: replaced("run/recipe.yaml", _link("/dev/zero")), EVALUATE, REFUSED),
    ("model is empty", lambda: replaced("run/model", os.mkdir), EVALUATE, REFUSED),
    ("model.safetensors is a pickle", lambda: wrote("run/model/model.safetensors", b"cbuiltins\nopen\n(S'../marker'\nS'w'\ntR.", []), EVALUATE, REFUSED),
    ("model.safetensors is a named pipe", lambda: replaced("run/model/model.safetensors", os.mkfifo), EVALUATE, REFUSED),
    ("model.safetensors links to /dev/zero", lambda: replaced("run/model/model.safetensors", _link("/dev/zero")), PREDICT, REFUSED),
    ("metrics.csv is binary", lambda: wrote("run/metrics.csv", os.urandom(10_000), []), RESUME, RAN),
    ("metrics.csv of the checkpoint is garbage", lambda: _said("metrics.csv", b"\xff\0\n" * 100), RESUME, ANY),
    ("metrics.csv of the checkpoint has another header", lambda: _said("metrics.csv", "step,loss\n1,2\n"), RESUME, ANY),
    ("metrics.csv is a link to the victim", lambda: replaced("run/metrics.csv", _link("../../victim")), RESUME, RAN),
    ("recipe.yaml is a link to the victim", lambda: replaced("run/recipe.yaml", _link("../../victim")), RESUME, ANY),
    ("supervisor.json is a link to the victim", lambda: os.symlink("../../victim", "run/supervisor.json"), ["run", "--restarts", "0", "--", "own.py", "--run.dir", "run", "--batch_size", "x"], ANY),
    ("model is a link to a folder elsewhere", lambda: replaced("run/model", _link("../bert")), RESUME, ANY),
    ("checkpoints is a link to itself", lambda: replaced("run/checkpoints", _link("checkpoints")), RESUME, REFUSED),
    ("checkpoints is a file", lambda: replaced("run/checkpoints", lambda path: wrote(path, "x", [])), RESUME, REFUSED),
    ("an empty step, resumed", lambda: os.mkdir("run/checkpoints/step-00000009"), RESUME, RAN),
    ("a step of 4,000 digits", lambda: os.mkdir("run/checkpoints/step-" + "9" * 240), LIST, RAN),
    ("a step of other digits", lambda: os.mkdir("run/checkpoints/step-" + "\u0663" * 8), LIST, RAN),
    ("a step called with escapes", lambda: os.mkdir(f"run/checkpoints/step-00000009{ESC}"), LIST, RAN),
    ("a manifest of format -1", lambda: forge(format=-1), VERIFY, REFUSED),
    ("a manifest of a negative step", lambda: forge(step=-2), VERIFY, REFUSED),
    ("a manifest of another step", lambda: forge(step=10**12), VERIFY, REFUSED),
    ("a manifest of epoch 10^30", lambda: forge(epoch=10**30), RESUME, ANY),
    ("a manifest of epoch -1", lambda: forge(epoch=-1), RESUME, ANY),
    ("a manifest of step_in_epoch 10^9", lambda: forge(step_in_epoch=10**9), RESUME, ANY),
    ("a manifest of 10^9 ranks", lambda: forge(world_size=10**9), RESUME, ANY),
    ("a manifest of 10^9 ranks, exported", lambda: (shutil.rmtree("run/model"), forge(world_size=10**9)), EXPORT, ANY),
    ("a manifest created with escapes", lambda: forge(created=ESC), LIST, RAN),
    ("a manifest of a run with escapes", lambda: forge(run=ESC), RESUME, ANY),
    ("a manifest of another recipe, with escapes", lambda: forge(recipe={ESC: ESC}), RESUME, ANY),
    ("a manifest of recipe keys that are lists", lambda: forge(recipe={"batch_size": [[[]]]}), RESUME, REFUSED),
    ("a manifest of figures that are lists", lambda: forge(figures={"accuracy": [1]}), LIST, ANY),
    ("a manifest of negative bytes", lambda: _entry("x"), VERIFY, REFUSED),
    ("a file ../../../victim", lambda: _entry("../../../../victim"), VERIFY, REFUSED),
    ("a file without a name", lambda: _entry(""), VERIFY, REFUSED),
    ("a file with escapes", lambda: (_entry(ESC), wrote(f"{STEP}/{ESC}", "x" * 8, [])), VERIFY, REFUSED),
    ("a file with NUL in its name", lambda: _entry("a\0b"), VERIFY, REFUSED),
    ("a manifest nested 100,000 deep", lambda: wrote(f"{STEP}/manifest.json", "[" * 100_000, []), LIST, RAN),
    ("a manifest of 5,000 digits", lambda: wrote(f"{STEP}/manifest.json", '{"step": ' + "9" * 5000 + "}", []), LIST, RAN),
    ("a manifest of 50 MB", lambda: wrote(f"{STEP}/manifest.json", "[" + "1," * 25_000_000 + "1]", []), LIST, RAN),
    ("a manifest that links to itself", lambda: replaced(f"{STEP}/manifest.json", _link("manifest.json")), LIST, RAN),
    ("state.json of another kind", lambda: _said("state.json", "[]"), RESUME, REFUSED),
    ("state.json nested deep", lambda: _said("state.json", "[" * 100_000), RESUME, REFUSED),
    ("rank-00000.json of nothing, exported", lambda: (shutil.rmtree("run/model"), _said("rank-00000.json", "{}")), EXPORT, ANY),
    ("rank-00000.json nested deep", lambda: _said("rank-00000.json", "[" * 100_000), RESUME, REFUSED),
    ("rank-00000.safetensors of nothing", lambda: _said("rank-00000.safetensors", b""), RESUME, REFUSED),
    ("rank-00000.safetensors is a pickle", lambda: _said("rank-00000.safetensors", b"cbuiltins\nopen\n(S'../marker'\nS'w'\ntR."), RESUME, REFUSED),
    ("rank-00000.safetensors without tensors", lambda: _said("rank-00000.safetensors", struct.pack("<Q", 2) + b"{}"), RESUME, REFUSED),
    ("a half-written folder that is a link", lambda: os.symlink("../..", "run/checkpoints/.step-00000003.x.part"), RESUME, RAN),
    ("a half-written folder that is a file", lambda: wrote("run/checkpoints/.step-00000003.x.part", "x", []), RESUME, RAN),
    ("an older folder called so that it is put back", lambda: shutil.copytree(STEP, "run/checkpoints/.step-00000009.x.old"), RESUME, RAN),
    ("resumed from its recipe.yaml", lambda: None, [*FIT, "--run.resume", "run/recipe.yaml"], REFUSED),
    ("resumed with another batch", lambda: None, [*RESUME, "--batch_size", "8"], REFUSED),
    ("resumed into its own checkpoints", lambda: None, [*FIT, "--run.resume", "run", "--run.dir", "run/checkpoints"], ANY),
    (".run.lock is a folder", lambda: os.mkdir("run/.run.lock"), RESUME, REFUSED),
    (".run.lock is a named pipe", lambda: replaced("run/.run.lock", os.mkfifo), RESUME, REFUSED),
    (".run.lock is garbage", lambda: wrote("run/.run.lock", b"\xff\0{", []), RESUME, RAN),
    (".run.lock is a second name of the victim", lambda: replaced("run/.run.lock", partial(os.link, "../victim")), RESUME, ANY),
    ("supervisor.json is garbage", lambda: wrote("run/supervisor.json", b"\xff\0{", []), ["run", "--restarts", "0", "--", "own.py", "--run.dir", "run", "--batch_size", "x"], ANY),
    ("bad_samples.json is a link to the victim", lambda: os.symlink("../../victim", "run/bad_samples.json"), RESUME, ANY),
]


def runs() -> Iterable[Case]:
    """Run directories and checkpoints."""
    for given, make, words, expect in RUNS:
        build = partial(done, make, words)
        with_image = partial(lambda build: wrote("i.png", picture(mode="L"), build()), build)
        yield Case("run directory", given, with_image, expect)


# ---------------------------------------------------------------------------------------------------------- predict

SAID: list[tuple[str, list[str], str]] = [
    ("nothing", ["predict", "spoken"], REFUSED),
    ("an empty text", ["predict", "spoken", "--trust-recipe", "--text", ""], REFUSED),
    ("blanks", ["predict", "spoken", "--trust-recipe", "--text", " \t\u00a0\u2003"], REFUSED),
    ("a million characters", ["predict", "spoken", "--trust-recipe", "--text=" + "good " * 20_000], RAN),
    ("control characters", ["predict", "spoken", "--trust-recipe", "--text", ESC], RAN),
    ("a newline and a forged line", ["predict", "spoken", "--trust-recipe", "--text", "a\nnegative\t1.0000\tb"], RAN),
    ("right to left, overridden", ["predict", "spoken", "--trust-recipe", "--text", "\u202egood\u2066"], RAN),
    ("bytes that are no UTF-8", ["predict", "spoken", "--trust-recipe", "--text", "good\udcff\udcfe"], ANY),
    ("a lone surrogate", ["predict", "spoken", "--trust-recipe", "--text", "\udce9"], ANY),
    ("an image for a text model", ["predict", "spoken", "--trust-recipe", "--image", "own.py"], REFUSED),
    ("a text for an image model", ["predict", "run", "--text", "a"], REFUSED),
    ("an image that is Python", ["predict", "run", "--image", "own.py"], REFUSED),
    ("an image that is /dev/zero", ["predict", "run", "--image", "/dev/zero"], REFUSED),
    ("an image of a name with escapes", ["predict", "run", "--image", f"{ESC}.png"], REFUSED),
    ("an image of a name of 100,000 letters", ["predict", "run", "--image", "a" * 100_000], REFUSED),
    ("an image that is a secret", ["predict", "run", "--image", "/etc/shadow"], REFUSED),
    ("a run of a name with escapes", ["predict", ESC, "--text", "a"], REFUSED),
    ("another model", ["evaluate", "run", "--model.hidden", "[3]"], REFUSED),
    ("no test set", ["evaluate", "spoken", "--trust-recipe"], REFUSED),
    ("another dataset's size", ["evaluate", "run", "--data.image_size", "9"], REFUSED),
]


def predict() -> Iterable[Case]:
    """What is classified."""
    for given, words, expect in SAID:
        yield Case("predict", given, partial(list, words), expect)
