"""What ``hostile.py`` gives the trainer: rows of data, and the small functions that write the files they speak of.

A case is built in an empty folder, the working directory, with ``own.py`` (a tiny recipe on digits), ``text.py`` (a tiny
BERT on ``t.csv``), ``run`` (a finished run of the first), ``spoken`` (one of the second) and ``bert`` (its model and
tokenizer) in it. ``../victim`` must stay as it is, and ``../marker`` must not appear.
"""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

REFUSED, OWN, RAN, ANY = "refused", "own", "ran", "any"
"""Refused in one line; an error of the person's own code, with its place before the traceback; ran; either will do."""

MARKER = "../marker"
CODE = f"open({MARKER!r}, 'w')\n"
ESC = "\x1b]0;owned\x07\x1b[2J"


class Case(NamedTuple):
    """One hostile input.

    Args:
        category: of the table.
        given: what it is, in words; also its name.
        build: writes what is needed, and returns the words after ``trainer``.
        expect: REFUSED, OWN, RAN or ANY.
        says: what the line of the error must contain, such as the key or the file.
        env: variables that are set, or removed where ``None``.
        fresh: whether it needs an interpreter of its own, as what it sets is read when that starts.
    """

    category: str
    given: str
    build: Callable[[], list[str]]
    expect: str = REFUSED
    says: str = ""
    env: Mapping[str, str | None] = {}
    fresh: bool = False


FIT = ["fit", "own.py"]
TEXT = ["fit", "text.py"]


def own(model: str = "MLP(hidden=[16])", data: str = "Digits()", more: str = "", before: str = "") -> str:
    """The source of a recipe of one step."""
    return f"""
from dataclasses import dataclass
import os, sys, warnings
import torch
from torch import nn
from trainer import Checkpoint, Data, Loss, Memory, Model, Optim, Recipe, Run
from trainer.data import CIFAR10, Digits, FashionMNIST, ImageFolder, IMDb, StreamedText, TextFiles
from trainer.models import MLP, TextClassifier
{before}
recipe = Recipe(
    model={model}, data={data},
    **dict(dict(optim=Optim("sgd", lr=0.1), batch_size=16, max_steps=1,
                run=Run(dir="out", predict=False, evaluate=False)), **dict({more})),
)
"""


TEXT_MODEL = "TextClassifier('bert')"
SPOKEN = own(TEXT_MODEL, "TextFiles('t.csv', cache_dir='cache', max_length=8)", "batch_size=2")
EVALUATED = "run=Run(dir='out', predict=False)"


def wrote(name: str, content: str | bytes, words: list[str]) -> list[str]:
    """Write a file, and return ``words``."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return words


def done(action: Callable[[], Any], words: list[str]) -> list[str]:
    """Do something, and return ``words``."""
    action()
    return words


# ----------------------------------------------------------------------------------------------------- command line

LINES: list[tuple[list[str], str, str]] = [
    (["fit", ""], REFUSED, "unknown recipe"),
    (["fit", "own.py", "own.py"], REFUSED, "own.py"),
    (["fit", "./../" + "x/../" * 500 + "own.py"], REFUSED, "no such file"),
    (["fit", "a" * 100_000 + ".py"], REFUSED, "recipe"),
    (["fit", "own\x1b[31m.py"], REFUSED, "no such file"),
    ([*FIT, "--=3"], REFUSED, ""),
    ([*FIT, "\u2014\u2014batch_size", "16"], REFUSED, "unexpected"),
    ([*FIT, "--b\u0430tch_size", "16"], REFUSED, "unknown flag"),
    ([*FIT, "--batch_size", "\uff11\uff16"], ANY, ""),
    *[([*FIT, "--batch_size", text], REFUSED, "batch_size") for text in ("1e3", "-5", "true", "nan", "[1,2]", "{a: 1}", "!!python/name:os.mkdir", "0o20", "2024-01-01")],
    ([*FIT, "--batch_size", "1" + "0" * 30], ANY, ""),
    ([*FIT, "--batch_size", "9" * 5000], REFUSED, "batch_size"),
    ([*FIT, "--batch_size", "[" * 100_000], REFUSED, ""),
    ([*FIT, "--batch_size", "&a [*a]"], REFUSED, "batch_size"),
    *[([*FIT, "--optim.lr", text], REFUSED, "lr") for text in ("inf", ".nan", "1e400", "-0.0", "fast")],
    ([*FIT, "--optim.lr", "1e308"], ANY, ""),
    *[([*FIT, f"--optim.{key}", text], REFUSED, key) for key, text in (("weight_decay", ".nan"), ("weight_decay", ".inf"), ("momentum", ".nan"), ("clip_norm", ".nan"), ("warmup_steps", "1.5"), ("scale_lr", "linear"), ("name", "sgd\x1b[31m"))],
    ([*FIT, "--optim.clip_norm", ".inf"], ANY, ""),
    ([*FIT, "--optim.warmup_steps", "1" + "0" * 400], ANY, ""),
    *[([*FIT, "--seed", text], REFUSED, "seed") for text in ("-1", str(2**63), "1.5", "")],
    *[([*FIT, "--accumulate", text], REFUSED, "accumulate") for text in ("{0: 8, -1: 2}", "{1: 2}", "{0: 0}", "{0.5: 3}", "{}", "[1]")],
    ([*FIT, "--accumulate", "1" + "0" * 12], REFUSED, "accumulate"),
    *[([*FIT, "--memory.budget", text], REFUSED, "budget") for text in ("nanGB", "1e400GB", "-1GB", "200%", "GB", "1 0GB", "0GB")],
    *[([*FIT, "--checkpoint.every", text], REFUSED, "every") for text in ("nanmin", "1e400h", "0s", "-1min", "soon")],
    ([*FIT, "--memory.micro_batch_size", "0"], REFUSED, "micro_batch_size"),
    ([*FIT, "--memory.activation_checkpointing", ".nan"], REFUSED, "activation_checkpointing"),
    ([*FIT, "--run.hang_after", ".nan"], REFUSED, "hang_after"),
    ([*FIT, "--run.devices", "1000000000"], REFUSED, "devices"),
    ([*FIT, "--run.logger", "[csv, \x1b[31m]"], REFUSED, "logger"),
    ([*FIT, "--run.resume", "/dev/null"], REFUSED, "resume"),
    ([*FIT, "--run.resume", "\x1b[31m"], REFUSED, "resume"),
    ([*FIT, "--run.resume", "x" * 5000], REFUSED, "resume"),
    ([*FIT, "--run.dir", "own.py"], REFUSED, "run.dir"),
    ([*FIT, "--run.dir", "own.py/inside"], REFUSED, "run.dir"),
    ([*FIT, "--run.dir", "/proc/self"], REFUSED, "run.dir"),
    ([*FIT, "--run.dir", f"a\n{ESC}"], ANY, ""),
    ([*FIT, "--run.dir", ""], ANY, ""),
    ([*FIT, "--data.image_size", "100000"], REFUSED, "image_size"),
    ([*FIT, "--data.image_size", "1" + "0" * 20], REFUSED, ""),
    ([*FIT, "--data.test_fraction", ".nan"], REFUSED, "test_fraction"),
    ([*FIT, "--data.worker_timeout", ".nan"], REFUSED, "worker_timeout"),
    ([*FIT, "--data.worker_timeout", "1e300", "--data.workers", "1"], ANY, ""),
    ([*FIT, "--model.hidden", "[1000000000000]"], REFUSED, "memory"),
    ([*FIT, "--model.hidden", "[16, null]"], REFUSED, "hidden"),
    ([*FIT, "--model.hidden+", "x"], REFUSED, "hidden"),
    ([*FIT, "--model.hidden", "[" + "1," * 2000 + "1]"], RAN, ""),
    ([*FIT, "--model.num_classes", "-3"], REFUSED, ""),
    ([*FIT, "--model.num_classes", "3"], REFUSED, ""),
    ([*FIT, "--model.dropout", ".nan"], REFUSED, "dropout"),
    ([*FIT, "--config", "missing.yaml"], REFUSED, "missing.yaml"),
    ([*FIT, *["--seed=1"] * 2_000], RAN, ""),
    (["plan", "own.py", "--gpu", "nonsense\x1b[31m"], REFUSED, "gpu"),
    (["plan", "own.py", "--gpu", "a100-80gb", "--devices", "0"], REFUSED, "devices"),
    (["plan", "own.py", "--gpu", "a100-80gb", "--devices", "9" * 9], REFUSED, "devices"),
    (["plan", "own.py", "--gpu", "cpu", "--out", "own.py"], REFUSED, "out"),
    (["ladder", "own.py", "--steps", "-1"], REFUSED, "steps"),
    (["checkpoint", "list", "\x1b[31m"], REFUSED, ""),
    (["checkpoint", "export", "run", "--out", "own.py"], REFUSED, "own.py"),
    (["run", "--restarts", "-1", "--", "own.py"], REFUSED, "restarts"),
    (["run", "--backoff", "nan", "--", "own.py"], REFUSED, "backoff"),
    (["run", "--", "own.py", "--run.dir", "own.py"], REFUSED, "run.dir"),
    (["--version\x1b[31m"], REFUSED, "unknown"),
    (["\udcff"], REFUSED, "unknown"),
    ([*FIT, "--run.dir", "out\udcff"], ANY, ""),
]


def command_line() -> Iterable[Case]:
    """Odd words."""
    for words, expect, says in LINES:
        yield Case("command line", " ".join(words), partial(list, words), expect, says)


# ------------------------------------------------------------------------------------------------------------- YAML

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
SETTINGS: dict[str, tuple[str | bytes, str, str]] = {
    "billion laughs": (BOMB, REFUSED, "x.yaml"),
    "an alias of itself within a section": ("optim: &a {lr: *a}", REFUSED, "x.yaml"),
    "a tab for indentation": ("optim:\n\tlr: 1", REFUSED, "x.yaml line 2"),
    "a section that is a list": ("optim: [1, 2]", REFUSED, "optim"),
    "a list at the top": ("- 1\n- 2", REFUSED, "x.yaml"),
    "a key given twice, far apart": ("seed: 1\noptim: {lr: 0.1}\nseed: 2", REFUSED, "duplicate"),
    "a key given twice, once dotted": ("optim: {lr: 0.1}\noptim.lr: 0.2", REFUSED, "optim.lr"),
    "Latin-1": ("seed: 1 # \xe9".encode("latin-1"), REFUSED, "x.yaml"),
    "a byte order mark": (b"\xef\xbb\xbfseed: 1\n", ANY, ""),
    "nothing": ("", RAN, ""),
    "two documents": ("seed: 1\n---\nseed: 2\n", REFUSED, "x.yaml"),
    "a merge key": ("b: &b {lr: 0.1}\noptim: {<<: *b}", REFUSED, ""),
    "an integer that is a date": ("seed: 2024-01-01", REFUSED, "seed"),
    "a float of 1e400": ("optim: {lr: 1.0e+400}", REFUSED, "lr"),
    "5,000 digits": ("seed: " + "9" * 5000, REFUSED, ""),
    "keys of control characters": (f'"a{json.dumps(ESC)[1:-1]}": 1'.encode(), REFUSED, "unknown key"),
    "a value of control characters": (f'optim: {{name: "{json.dumps(ESC)[1:-1]}"}}', REFUSED, "name"),
    "a key of 100,000 letters": ("a" * 100_000 + ": 1", REFUSED, ""),
    "a set": ("model: {hidden: !!set {1, 2}}", ANY, ""),
    "an object": ("seed: !!python/object/apply:builtins.open ['../marker', 'w']", REFUSED, "x.yaml"),
    "an object deep in a list": ("model: {hidden: [1, !!python/object/apply:os.mkdir ['../marker']]}", REFUSED, ""),
    "mappings nested 2,000 deep": ("{a: " * 2000 + "1" + "}" * 2000, REFUSED, "x.yaml"),
    "NULs": (b"seed: 1\0\0\0", REFUSED, "x.yaml"),
    "an unclosed quote": ('seed: "1', REFUSED, "x.yaml"),
    "a recipe that is a list": ("recipe: [own.py]", REFUSED, "recipe"),
    "a recipe that is itself": ("recipe: x.yaml", REFUSED, "x.yaml"),
    "a recipe with control characters": (f'recipe: "{json.dumps(ESC)[1:-1]}.py"', REFUSED, "no such file"),
}


def yaml() -> Iterable[Case]:
    """Files of settings."""
    for given, (text, expect, says) in SETTINGS.items():
        yield Case("YAML", given, partial(wrote, "x.yaml", text, [*FIT, "--config", "x.yaml"]), expect, says)
    fit = ["fit", "x.yaml"]
    yield Case(
        "YAML", "a recipe.yaml that names no recipe", partial(wrote, "x.yaml", "seed: 1", fit), REFUSED, "recipe"
    )
    yield Case("YAML", "a recipe.yaml that names itself", partial(wrote, "x.yaml", "recipe: x.yaml", fit))
    yield Case("YAML", "a folder x.yaml", partial(done, partial(os.mkdir, "x.yaml"), fit), REFUSED, "x.yaml")
    yield Case("YAML", "a link to itself", partial(done, partial(os.symlink, "x.yaml", "x.yaml"), fit))
    yield Case("YAML", "a named pipe", partial(done, partial(os.mkfifo, "x.yaml"), fit), REFUSED, "x.yaml")
    yield Case("YAML", "a link to /dev/zero", partial(done, partial(os.symlink, "/dev/zero", "x.yaml"), fit))


# ---------------------------------------------------------------------------------------------------------- recipes

SOURCES: dict[str, tuple[str | bytes, str, str]] = {
    "nothing": ("", REFUSED, "own.py"),
    "a syntax error": ("recipe = (", REFUSED, "own.py line 1"),
    "NULs": (b"recipe = 1\0", REFUSED, "own.py"),
    "Latin-1 without saying so": ("# \xe9\nrecipe = 1".encode("latin-1"), REFUSED, "own.py"),
    "an unknown encoding": ("# coding: nonsense\nrecipe = 1", REFUSED, "own.py"),
    "a byte order mark": (b"\xef\xbb\xbf" + own().encode(), RAN, ""),
    "20,000 brackets": ("recipe = " + "(" * 20_000 + "1" + ")" * 20_000, REFUSED, "own.py"),
    "a sum of 100,000 terms": ("recipe = " + "+".join(["1"] * 100_000), REFUSED, "own.py"),
    "recipe = None": ("recipe = None", REFUSED, "own.py"),
    "an error at import, with escapes": (f"raise ValueError({ESC!r})", REFUSED, "own.py line 1"),
    "an error of forged lines": ("raise ValueError('a\\ntrainer: error: forged')", REFUSED, "own.py line 1"),
    "an error that cannot be printed": ("class E(Exception):\n    def __str__(self): return 1 / 0\nraise E", REFUSED, "own.py"),
    "SystemExit(0) at import": ("import sys\nsys.exit(0)", REFUSED, "own.py"),
    "another BaseException at import": ("class Gone(BaseException): pass\nraise Gone('x')", REFUSED, "own.py"),
    "endless recursion at import": ("def f(): return f()\nf()", REFUSED, "own.py"),
    "MemoryError at import": ("x = bytearray(10**15)", REFUSED, "own.py line 1"),
    "optim=None": (own(more="optim=None"), REFUSED, ""),
    "optim of another type": (own(more="optim={'lr': 1}"), REFUSED, ""),
    "run=None": (own(more="run=None"), REFUSED, ""),
    "checkpoint is a text": (own(more="checkpoint='1h'"), REFUSED, ""),
    "model is a class": (own("MLP"), REFUSED, "model"),
    "epochs=1.5": (own(more="epochs=1.5"), REFUSED, "epochs"),
    "lr is a text": (own(more="optim=Optim('sgd', lr='fast')"), REFUSED, "lr"),
    "lr is a tensor of two": (own(more="optim=Optim('sgd', lr=torch.ones(2))"), REFUSED, ""),
    "logger is a text": (own(more="run=Run(logger='csv', dir='out', predict=False, evaluate=False)"), ANY, ""),
    "run.dir is a number": (own(more="run=Run(dir=7, predict=False, evaluate=False)"), REFUSED, ""),
    "workers=0.5": (own(data="Digits(workers=0.5)"), REFUSED, "workers"),
    "budget is a number": (own(more="memory=Memory(budget=5)"), REFUSED, ""),
    "changes the working directory": (own(before="os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere')"), RAN, ""),
    "removes the working directory": (own(before="import shutil; shutil.rmtree(os.getcwd())"), OWN, ""),
    "sets the default type to float64": (own(before="torch.set_default_dtype(torch.float64)"), OWN, ""),
    "sets the default device to meta": (own(before="torch.set_default_device('meta')"), ANY, ""),
    "warnings are errors": (own(before="warnings.simplefilter('error')"), RAN, ""),
    "turns gradients off": (own(before="torch.set_grad_enabled(False)"), OWN, ""),
    "a field that no setting can be": (own("M()", before="@dataclass\nclass M(MLP):\n    what: object = lambda: 1\n"), RAN, ""),
    "a property that raises": (own("M()", before="@dataclass\nclass M(MLP):\n    @property\n    def blocks(self): 1 / 0\n"), OWN, ""),
    "loss_names is empty": (own("M()", before="@dataclass\nclass M(MLP):\n    loss_names = ()\n"), ANY, ""),
}

BUILDS: dict[str, tuple[str, str]] = {
    "raises with escapes": (f"raise ValueError({ESC!r})", OWN),
    "has no parameters": ("return nn.Flatten()", REFUSED),
    "has frozen parameters only": ("return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)", REFUSED),
    "has 10^11 columns": ("return nn.Linear(64, 10**11)", REFUSED),
    "is complex": ("return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, dtype=torch.complex64))", OWN),
    "has names of control characters": (f"m = nn.Sequential(nn.Flatten()); m.add_module({ESC.replace('.', '')!r}, nn.Linear(64, 10)); return m", ANY),
    "exits with 0": ("sys.exit(0)", OWN),
    "cannot be saved": ("m = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)); m.state_dict = lambda *a, **k: 1 / 0; return m", OWN),
    "contains itself": ("m = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)); m[0].parent = m; return m", OWN),
}

LOGITS = "module(batch['pixel_values']).float()"
SUM = f"nn.functional.cross_entropy({LOGITS}, batch['labels'], reduction='sum')"
LOSSES: dict[str, tuple[str, str]] = {
    "yields nothing": ("return iter(())", OWN),
    "yields a tensor": (f"yield {SUM}", OWN),
    "yields a tuple": (f"yield ({SUM}, 16)", OWN),
    "yields a vector": (f"yield Loss({LOGITS}.sum(0), weight=16.0)", OWN),
    "yields a detached loss": (f"yield Loss({SUM}.detach(), weight=16.0)", OWN),
    "yields infinity, for ever": (f"yield Loss({SUM} / 0, weight=16.0)", REFUSED),
    "yields without end": (f"while True: yield Loss({SUM}, weight=16.0)", OWN),
    "yields another name": (f"yield Loss({SUM}, weight=16.0, name='other')", OWN),
    "yields a name of control characters": (f"yield Loss({SUM}, weight=16.0, name={ESC!r})", OWN),
    "another weight than weigh": (f"yield Loss({SUM}, weight=3.0)", REFUSED),
    "a weight of nan": (f"yield Loss({SUM}, weight=float('nan'))", OWN),
    "float64": (f"yield Loss({SUM}.double(), weight=16.0)", RAN),
    "logits of another shape": (f"yield Loss({SUM}, weight=16.0, logits={LOGITS}[:3].detach(), targets=batch['labels'])", OWN),
    "raises StopIteration": ("raise StopIteration", OWN),
    "raises 10 MB": ("raise ValueError('x' * 10**7)", OWN),
    "raises forged lines": ("raise ValueError('a\\ntrainer: error: forged')", OWN),
    "raises what cannot be printed": ("E = type('E', (Exception), {'__str__': lambda s: 1 / 0}); raise E()", OWN),
    "raises a BaseException": ("raise type('Gone', (BaseException), {})('x')", OWN),
    "raises MemoryError": ("bytearray(10**15)", OWN),
    "recurses for ever": ("yield from self.losses(module, batch)", OWN),
    "exits with 0": ("sys.exit(0)", OWN),
}

SPLITS: dict[str, tuple[str, str]] = {
    "of length 0": ("def __len__(self): return 0", REFUSED),
    "of length 1": ("def __len__(self): return 1", RAN),
    "of length -1": ("def __len__(self): return -1", OWN),
    "of length 10^15": ("def __len__(self): return 10**15", REFUSED),
    "whose length raises": ("def __len__(self): raise OSError(5, 'gone')", OWN),
    "that gives None": ("def __getitem__(self, i): return None", REFUSED),
    "of varying keys": ("def __getitem__(self, i): return {**self.of[i], str(i): 1}", REFUSED),
    "of varying shapes": ("def __getitem__(self, i): return {**self.of[i], 'pixel_values': torch.zeros(1, i % 7 + 1)}", REFUSED),
    "without labels": ("def __getitem__(self, i): return {'pixel_values': self.of[i]['pixel_values']}", OWN),
    "of float labels": ("def __getitem__(self, i): return {**self.of[i], 'labels': 0.5}", OWN),
    "of a label of -1": ("def __getitem__(self, i): return {**self.of[i], 'labels': -1}", REFUSED),
    "of a label of 10": ("def __getitem__(self, i): return {**self.of[i], 'labels': 10}", REFUSED),
    "of a label of 10^30": ("def __getitem__(self, i): return {**self.of[i], 'labels': 10**30}", REFUSED),
    "of labels that are all -100": ("def __getitem__(self, i): return {**self.of[i], 'labels': -100}", ANY),
    "of pixels that are nan": ("def __getitem__(self, i): return {**self.of[i], 'pixel_values': torch.full((1, 8, 8), float('nan'))}", REFUSED),
    "of 4 GB a sample": ("def __getitem__(self, i): return {**self.of[i], 'pixel_values': torch.empty(10**12)}", REFUSED),
    "that raises GeneratorExit": ("def __getitem__(self, i): raise GeneratorExit", OWN),
    "that raises MemoryError": ("def __getitem__(self, i): raise MemoryError", OWN),
    "that raises escapes": (f"def __getitem__(self, i): raise ValueError({ESC!r})", REFUSED),
    "that describes with escapes": (f"def describe(self, i): return {ESC!r}\n    def __getitem__(self, i): raise ValueError('x')", REFUSED),
    "that raises while it describes": ("def describe(self, i): 1 / 0\n    def __getitem__(self, i): raise ValueError('x')", OWN),
    "whose fingerprint raises": ("def fingerprint(self): 1 / 0", ANY),
    "whose lengths are too few": ("lengths = [1, 2, 3]", OWN),
    "whose lengths are negative": ("lengths = [-1] * 1437", ANY),
    "whose groups do not add up": ("groups = property(lambda s: __import__('trainer.values').values.Groups([1, 2], 4))", OWN),
    "whose __getitems__ gives None": ("def __getitems__(self, indices): return None", OWN),
    "whose __getitems__ gives too many": ("def __getitems__(self, indices): return [self.of[0]] * 99", REFUSED),
}

PREPARES: dict[str, tuple[str, str]] = {
    "raises a BaseException": ("raise type('Gone', (BaseException), {})('x')", OWN),
    "exits with 0": ("sys.exit(0)", OWN),
    "leaves train at None": ("self.train = None", REFUSED),
    "makes the test set empty": ("self.test = []", ANY),
    "has class names with escapes": (f"self.class_names = [{ESC!r} + str(i) for i in range(10)]", RAN),
    "has class names with forged lines": ("self.class_names = ['a\\ntrainer: error: forged'] * 10", RAN),
    "has too few class names": ("self.class_names = ['a']", ANY),
    "has class names that are numbers": ("self.class_names = list(range(10))", ANY),
    "has 0 classes": ("self.num_classes = 0", REFUSED),
    "changes the working directory": ("os.makedirs('x', exist_ok=True); os.chdir('x')", RAN),
    "collates to None": ("self.train = [1] * 32; self.collate = lambda samples: None", OWN),
}


def recipes() -> Iterable[Case]:
    """Files of Python: their own faults, and those of their models, losses and datasets."""
    for given, (source, expect, says) in SOURCES.items():
        yield Case("recipe file", given, partial(wrote, "own.py", source, FIT), expect, says)
    for name in ("random", "json", "torch", "trainer"):
        words = ["fit", f"{name}.py"]
        yield Case("recipe file", f"is called {name}.py", partial(wrote, f"{name}.py", own(), words), RAN)
    pair = "import own\nrecipe = own.recipe"
    yield Case(
        "recipe file", "imports one that imports it", lambda: wrote("a.py", pair, wrote("own.py", "import a", FIT))
    )
    yield Case("recipe file", "a named pipe", partial(done, partial(os.mkfifo, "p.py"), ["fit", "p.py"]))
    yield Case("recipe file", "a link to itself", partial(done, partial(os.symlink, "l.py", "l.py"), ["fit", "l.py"]))
    yield Case(
        "recipe file", "a link to /dev/zero", partial(done, partial(os.symlink, "/dev/zero", "l.py"), ["fit", "l.py"])
    )
    for given, (body, expect) in BUILDS.items():
        before = f"@dataclass\nclass M(MLP):\n    def build(self):\n        {body}\n"
        yield Case("model", given, partial(wrote, "own.py", own("M()", before=before), FIT), expect)
    for given, (body, expect) in LOSSES.items():
        before = f"@dataclass\nclass M(MLP):\n    def losses(self, module, batch):\n        {body}\n"
        source = own("M(hidden=[16])", more=f"max_steps=30, {EVALUATED}", before=before)
        yield Case("losses", given, partial(wrote, "own.py", source, FIT), expect)
    for given, (body, expect) in SPLITS.items():
        before = f"""
class Split:
    def __init__(self, of): self.of = of
    def __len__(self): return len(self.of)
    def __getitem__(self, i): return self.of[i]
    {body}
@dataclass
class D(Digits):
    def prepare(self, tokenizer=None):
        super().prepare(tokenizer)
        self.train = Split(self.train)
"""
        source = own(data="D()", more="max_steps=30", before=before)
        yield Case("dataset", f"a split {given}", partial(wrote, "own.py", source, FIT), expect)
    for given, (body, expect) in PREPARES.items():
        before = f"@dataclass\nclass D(Digits):\n    def prepare(self, tokenizer=None):\n        super().prepare()\n        {body}\n"
        source = own(data="D()", more=EVALUATED, before=before)
        yield Case("dataset", f"prepare {given}", partial(wrote, "own.py", source, FIT), expect)


# ------------------------------------------------------------------------------------------------------- data files

GOOD = "text,label\ngood film,1\nbad film,0\ngood,1\nbad,0\n"
CSV: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", REFUSED),
    "header only": ("text,label\n", REFUSED),
    "a byte order mark": (b"\xef\xbb\xbf" + GOOD.encode(), RAN),
    "Latin-1": ("text,label\ncaf\xe9,1\nbad,0\n".encode("latin-1"), REFUSED),
    "NULs": (b"text,label\ngo\0od,1\nbad,0\n", ANY),
    "a quote that never closes": ('text,label\n"good,1\nbad,0\n', REFUSED),
    "2,000 columns": (",".join(["text", "label", *map(str, range(2000))]) + "\n" + "a,1" + ",x" * 2000 + "\nb,0" + ",x" * 2000, RAN),
    "a row that is too long": ("text,label\ngood,1,2,3\nbad,0\n", REFUSED),
    "a blank label": ("text,label\ngood,\nbad,0\n", REFUSED),
    "a header of control characters": (f"{ESC},label\ngood,1\n", REFUSED),
    "labels of control characters": (f"text,label\ngood,{ESC}\nbad,0\n", RAN),
    "a label of 5,000 digits": (f"text,label\na,{'9' * 5000}\nb,1\n", ANY),
    "labels of other digits": ("text,label\na,\u0663\nb,\u00b2\nc,-1\n", RAN),
    "3,000 classes": ("text,label\n" + "".join(f"good,c{n}\n" for n in range(3000)), RAN),
    "CR": (GOOD.replace("\n", "\r"), ANY),
    "a column twice": ("text,label,label\na,1,0\nb,0,1\n", REFUSED),
    "gzip": (gzip.compress(GOOD.encode()), REFUSED),
}
JSONL: dict[str, tuple[str | bytes, str]] = {
    "cut": ('{"text": "a", "label": 1}\n{"text": "b", "la', REFUSED),
    "an array": ('[{"text": "a", "label": 1}]', REFUSED),
    "NaN labels": ('{"text": "a", "label": NaN}\n{"text": "b", "label": 0}\n', REFUSED),
    "labels that are lists": ('{"text": "a", "label": [1]}\n{"text": "b", "label": [0]}\n', ANY),
    "a lone surrogate": ('{"text": "a\\ud800", "label": 1}\n{"text": "b", "label": 0}\n', ANY),
    "a label of 400 digits": ('{"text": "a", "label": 1' + "0" * 400 + '}\n{"text": "b", "label": 0}\n', ANY),
    "a label of 5,000 digits": ('{"text": "a", "label": 1' + "0" * 5000 + '}\n{"text": "b", "label": 0}\n', REFUSED),
    "not UTF-8": (b'{"text": "\xff\xfe", "label": 1}\n', REFUSED),
    "other keys in every line": ('{"text": "a", "label": 1, "x": 1}\n{"label": 0, "text": "b", "y": [1]}\n', ANY),
    "a key twice": ('{"text": "a", "label": 1, "label": 0}\n{"text": "b", "label": 0}\n', ANY),
    "control characters": (json.dumps({"text": ESC, "label": ESC}) + '\n{"text": "b", "label": "0"}\n', ANY),
}


def _parquet(**columns: Any) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def _columns() -> dict[str, tuple[Callable[[], bytes], str]]:
    import decimal

    import pyarrow as pa

    texts, labels = ["a", "b"], [1, 0]
    good = partial(_parquet, text=texts, label=labels)
    twice = pa.table([pa.array(texts), pa.array(labels), pa.array(labels)], names=["text", "label", "label"])
    return {
        "a footer cut off": (lambda: good()[:-20], REFUSED),
        "a footer of 4 GB": (lambda: good()[:-8] + b"\xff\xff\xff\x7fPAR1", REFUSED),
        "the magic of encryption": (lambda: good()[:-4] + b"PARE", REFUSED),
        "zeros within": (lambda: b"PAR1" + b"\0" * (len(good()) - 700) + good()[-696:], REFUSED),
        "no rows": (partial(_parquet, text=pa.array([], pa.string()), label=pa.array([], pa.int64())), REFUSED),
        "labels that are decimals": (partial(_parquet, text=texts, label=[decimal.Decimal("1.50"), decimal.Decimal("0.00")]), ANY),
        "labels that are nan": (partial(_parquet, text=texts, label=[float("nan"), 1.0]), REFUSED),
        "labels of a dictionary": (partial(_parquet, text=texts, label=pa.array(["x", "y"]).dictionary_encode()), RAN),
        "labels that are lists": (partial(_parquet, text=texts, label=[[1], [0]]), ANY),
        "names of control characters": (lambda: _parquet(**{"text": texts, ESC: labels}), REFUSED),
        "a column twice": (lambda: _written(twice), REFUSED),
    }


STREAMED = ("a footer of 4 GB", "the magic of encryption", "zeros within", "no rows", "texts that are lists", "labels that are nan")


def _written(table: Any) -> bytes:
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return buffer.getvalue()


def tables() -> Iterable[Case]:
    """Texts with labels."""
    for given, (text, expect) in CSV.items():
        says = "t.csv" if expect == REFUSED else ""
        yield Case("text files", f"csv: {given}", partial(wrote, "t.csv", text, TEXT), expect, says)
    for given, (text, expect) in JSONL.items():
        words = [*TEXT, "--data.train_file", "t.jsonl"]
        says = "t.jsonl" if expect == REFUSED else ""
        yield Case("text files", f"jsonl: {given}", partial(wrote, "t.jsonl", text, words), expect, says)
    words = [*TEXT, "--data.train_file", "t.parquet"]
    streamed = own(TEXT_MODEL, "StreamedText('shards', cache_dir='cache', max_length=8)", "batch_size=2")
    for given, (made, expect) in _columns().items():
        says = "t.parquet" if expect == REFUSED else ""
        yield Case("text files", f"parquet: {given}", lambda made=made: wrote("t.parquet", made(), words), expect, says)
        if given not in STREAMED:
            continue
        yield Case(
            "text files",
            f"streamed parquet: {given}",
            lambda made=made: wrote("shards/t.parquet", made(), wrote("own.py", streamed, FIT)),
            expect,
            says,
        )
    folder = own(TEXT_MODEL, "IMDb('texts', cache_dir='cache', max_length=8)", "batch_size=2")
    odd: dict[str, tuple[Callable[[], Any], str]] = {
        "no neg": (lambda: wrote("texts/train/pos/1.txt", "a", []), REFUSED),
        "an empty file": (lambda: _texts(b""), REFUSED),
        "not UTF-8": (lambda: _texts(b"\xff\xfe\xfd"), REFUSED),
        "NULs": (lambda: _texts(b"good\0film"), ANY),
        "a link to itself": (lambda: (_texts(b"good"), os.symlink("l.txt", "texts/train/pos/l.txt")), REFUSED),
        "a folder 2.txt": (lambda: (_texts(b"good"), os.mkdir("texts/train/pos/2.txt")), REFUSED),
        "a name of control characters": (
            lambda: (_texts(b"good"), wrote("texts/train/pos/\x1b[31m.txt", b"\xff", [])),
            REFUSED,
        ),
        "a name that is no UTF-8": (lambda: (_texts(b"good"), wrote("texts/train/pos/\udcff.txt", "good", [])), ANY),
    }
    for given, (make, expect) in odd.items():
        yield Case("text files", f"folder: {given}", lambda make=make: done(make, wrote("own.py", folder, FIT)), expect)
    yield Case(
        "text files",
        "a folder t.csv",
        lambda: done(lambda: (os.unlink("t.csv"), os.mkdir("t.csv")), TEXT),
        REFUSED,
        "t.csv",
    )
    yield Case(
        "text files",
        "csv without an ending",
        lambda: wrote("t", GOOD, [*TEXT, "--data.train_file", "t"]),
        REFUSED,
        "csv",
    )
    yield Case("text files", "a cache that is a file", lambda: wrote("file", "x", [*TEXT, "--data.cache_dir", "file"]), REFUSED, "file")
    yield Case(
        "text files", "data.max_length 10^9", lambda: [*TEXT, "--data.max_length", "1000000000"], REFUSED, "max_length"
    )
    yield Case(
        "text files", "data.text_column is the label", lambda: [*TEXT, "--data.text_column", "label"], REFUSED, "column"
    )


def _texts(first: bytes) -> None:
    for part in ("train", "test"):
        for name in ("pos", "neg"):
            wrote(f"texts/{part}/{name}/0.txt", "film", [])
    wrote("texts/train/pos/1.txt", first, [])


# ----------------------------------------------------------------------------------------------------------- images


def _picture(kind: str = "PNG", size: tuple[int, int] = (8, 8), mode: str = "RGB", **options: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.new(mode, size)
    if options.pop("frames", False):
        options |= {"save_all": True, "append_images": [Image.new(mode, size)] * 3}
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _png(width: int, height: int, *extra: bytes, pixels: bytes = b"") -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + _chunk(b"IDAT", zlib.compress(pixels)) + _chunk(b"IEND", b"")


PICTURES: dict[str, tuple[Callable[[], bytes], str]] = {
    "0 bytes": (lambda: b"", REFUSED),
    "1 pixel": (lambda: _picture(size=(1, 1)), RAN),
    "an animated GIF": (lambda: _picture("GIF", mode="P", frames=True), RAN),
    "CMYK": (lambda: _picture("JPEG", mode="CMYK"), RAN),
    "16 bits": (lambda: _picture(mode="I;16"), RAN),
    "floats": (lambda: _picture("TIFF", mode="F"), RAN),
    "a JPEG that is cut": (lambda: _picture("JPEG", (64, 64))[:-300], REFUSED),
    "a PNG that is cut": (lambda: _picture(size=(64, 64))[:-30], REFUSED),
    "a PNG of 60,000 x 60,000": (lambda: _png(60_000, 60_000), REFUSED),
    "a PNG without its pixels": (lambda: _png(8, 8), REFUSED),
    "a PNG with a text of 200 MB": (lambda: _png(8, 8, _chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 200_000_000)), pixels=b"\0" * 200), ANY),
    "a PNG with a profile of 100 MB": (lambda: _png(8, 8, _chunk(b"iCCP", b"a\0\0" + zlib.compress(b"x" * 100_000_000)), pixels=b"\0" * 200), ANY),
    "a TIFF of a million pages": (lambda: b"II*\0\x08\0\0\0\0\0\x08\0\0\0", REFUSED),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", REFUSED),
}


def images() -> Iterable[Case]:
    """Folders of images, arrays of them and the files of Fashion-MNIST."""
    words = wrote_folder = FIT
    source = own("MLP(hidden=[4])", "ImageFolder('pics', image_size=8, cache_dir='cache')", "batch_size=4")

    def pics(make: Callable[[], Any]) -> list[str]:
        for part in ("train", "test"):
            for name in "ab":
                for number in range(2):
                    wrote(f"pics/{part}/{name}/{number}.png", _picture(), [])
        make()
        return wrote("own.py", source, words)

    for given, (made, expect) in PICTURES.items():
        build = partial(pics, lambda made=made: wrote("pics/train/a/odd.png", made(), []))
        yield Case("images", given, build, expect, "odd.png" if expect == REFUSED else "")
    for given, action, expect in (
        ("a folder odd.png", lambda: os.mkdir("pics/train/a/odd.png"), ANY),
        ("a link to itself", lambda: os.symlink("odd.png", "pics/train/a/odd.png"), REFUSED),
        ("a link that leads nowhere", lambda: os.symlink("nowhere.png", "pics/train/a/odd.png"), REFUSED),
        ("a loop of folders", lambda: os.symlink("..", "pics/train/a/up"), ANY),
        ("a class of no images", lambda: os.mkdir("pics/train/c"), REFUSED),
        ("a class that is a file", lambda: wrote("pics/train/c", "x", []), ANY),
        ("a class with escapes", lambda: os.mkdir(f"pics/train/{ESC}"), REFUSED),
        (
            "two classes that look alike",
            lambda: [
                wrote(f"pics/{p}/{n}/0.png", _picture(), []) for p in ("train", "test") for n in ("\xe9", "e\u0301")
            ],
            ANY,
        ),
        ("a name with a newline", lambda: wrote("pics/train/a/x\ntrainer: error: forged.png", b"", []), REFUSED),
        ("no train", lambda: shutil.rmtree("pics/train"), REFUSED),
        ("a test class of its own", lambda: wrote("pics/test/z/0.png", _picture(), []), REFUSED),
    ):
        yield Case("images", given, partial(pics, action), expect)
    yield from _arrays(wrote_folder)
    yield from _idx(wrote_folder)


def _arrays(words: list[str]) -> Iterable[Case]:
    import numpy as np

    source = own("MLP(hidden=[4])", "CIFAR10('x.npz')", "batch_size=4")
    pixels, labels = np.zeros((8, 32, 32, 3), np.uint8), np.array([0, 1] * 4)
    good: dict[str, Any] = {
        "images": pixels,
        "labels": labels,
        "split": np.array([0] * 4 + [1] * 4),
        "class_names": np.array(["a", "b"]),
    }

    def write(changed: Mapping[str, Any]) -> list[str]:
        np.savez("x.npz", **{key: value for key, value in (good | dict(changed)).items() if value is not None})
        return wrote("own.py", source, words)

    def bomb(name: str, head: bytes, count: int) -> list[str]:
        write({name: None})
        with zipfile.ZipFile("x.npz", "a", zipfile.ZIP_DEFLATED) as file, file.open(f"{name}.npy", "w") as member:
            member.write(head)
            for _ in range(count):
                member.write(b"\0" * 2**20)
        return words

    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2000000, 32, 32, 3), }"
    large = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n"
    rows: list[tuple[str, Callable[[], list[str]], str]] = [
        ("floats", partial(write, {"images": pixels.astype("float32")}), REFUSED),
        ("labels of floats that are nan", partial(write, {"labels": np.full(8, np.nan)}), REFUSED),
        ("a label of -1", partial(write, {"labels": np.array([-1, 1] * 4)}), REFUSED),
        ("a label of 2^63", partial(write, {"labels": np.array([2**63, 1] * 4, np.uint64)}), REFUSED),
        ("too few labels", partial(write, {"labels": labels[:3]}), REFUSED),
        ("no labels", partial(write, {"labels": None}), REFUSED),
        ("a split of 7", partial(write, {"split": np.full(8, 7)}), REFUSED),
        ("a split of texts", partial(write, {"split": np.array(["0"] * 8)}), REFUSED),
        ("a split of booleans", partial(write, {"split": np.array([False, True] * 4)}), ANY),
        ("names of control characters", partial(write, {"class_names": np.array([ESC, "b"])}), RAN),
        ("names of bytes", partial(write, {"class_names": np.array([b"\xff", b"b"])}), ANY),
        ("one class", partial(write, {"class_names": np.array(["a"]), "labels": np.zeros(8, int)}), ANY),
        ("images of no height", partial(write, {"images": np.zeros((8, 0, 32, 3), np.uint8)}), REFUSED),
        ("big-endian labels", partial(write, {"labels": labels.astype(">i8")}), ANY),
        ("columns before rows", partial(write, {"images": np.asfortranarray(pixels)}), RAN),
        ("6 GB in a file of 6 MB", partial(bomb, "images", large, 5860), REFUSED),
        ("an array cut off", partial(bomb, "images", large, 1), REFUSED),
        ("no zip", lambda: wrote("x.npz", b"PK\x03\x04nonsense", wrote("own.py", source, words)), REFUSED),
        ("a folder x.npz", lambda: done(partial(os.mkdir, "x.npz"), wrote("own.py", source, words)), REFUSED),
    ]
    for given, build, expect in rows:
        yield Case("images", f"npz: {given}", build, expect, "x.npz" if expect == REFUSED else "")


def _idx(words: list[str]) -> Iterable[Case]:
    source = own("MLP(hidden=[4])", "FashionMNIST('d', download=False)", "batch_size=4")

    def write(**changed: bytes) -> list[str]:
        for part in ("train", "t10k"):
            pixels = struct.pack(">IIII", 0x803, 4, 28, 28) + bytes(4 * 784)
            labels = struct.pack(">II", 0x801, 4) + bytes([0, 1, 2, 3])
            for kind, content in (("images-idx3", pixels), ("labels-idx1", labels)):
                new = changed.get(kind[:6], content) if part == "train" else content
                wrote(f"d/FashionMNIST/raw/{part}-{kind}-ubyte", new, [])
        return wrote("own.py", source, words)

    for given, changed, expect in (
        ("as it should be", {}, RAN),
        ("another magic number", {"images": struct.pack(">IIII", 0x12345678, 4, 28, 28)}, REFUSED),
        ("images cut off", {"images": struct.pack(">IIII", 0x803, 4, 28, 28) + bytes(99)}, REFUSED),
        ("2^32 images", {"images": struct.pack(">IIII", 0x803, 2**32 - 1, 28, 28) + bytes(99)}, REFUSED),
        ("images of floats", {"images": struct.pack(">IIII", 0xD03, 4, 28, 28) + bytes(4 * 784 * 4)}, REFUSED),
        (
            "no images",
            {"images": struct.pack(">IIII", 0x803, 0, 28, 28), "labels": struct.pack(">II", 0x801, 0)},
            REFUSED,
        ),
        ("too few labels", {"labels": struct.pack(">II", 0x801, 2) + bytes(2)}, REFUSED),
        ("labels of 200", {"labels": struct.pack(">II", 0x801, 4) + bytes([200] * 4)}, REFUSED),
        ("empty", {"images": b""}, REFUSED),
    ):
        yield Case("images", f"idx: {given}", partial(write, **changed), expect)


# ----------------------------------------------------------------------------------------- models and tokenizers


def _json(path: str, drop: Iterable[str] = (), **changes: Any) -> None:
    content = json.loads(Path(path).read_text())
    kept = {key: value for key, value in content.items() if key not in drop}
    Path(path).write_text(json.dumps(kept | changes))


def _tensors(change: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]) -> None:
    path = Path("bert/model.safetensors")
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = change(json.loads(raw[8 : 8 + length]), raw[8 + length :])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _first(header: dict[str, Any]) -> dict[str, Any]:
    return next(value for key, value in header.items() if key != "__metadata__")


def _changed(**changes: Any) -> Callable[[], None]:
    def change(header: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        _first(header).update(changes)
        return header, data

    return partial(_tensors, change)


def _trapped(name: str) -> None:
    """A pickle, written by hand, that opens the marker."""
    os.unlink("bert/model.safetensors")
    wrote(f"bert/{name}", b"cbuiltins\nopen\n(S'../marker'\nS'w'\ntR.", [])


def _index(target: str) -> None:
    weights = Path("bert/model.safetensors").rename("shard.safetensors")
    header = json.loads(weights.read_bytes()[8 : 8 + int.from_bytes(weights.read_bytes()[:8], "little")])
    names = dict.fromkeys((name for name in header if name != "__metadata__"), target)
    wrote("bert/model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": names}), [])


CONFIG, TOKENIZER = "bert/config.json", "bert/tokenizer.json"
FOLDERS: dict[str, tuple[Callable[[], Any], str]] = {
    "config.json cut": (lambda: wrote(CONFIG, Path(CONFIG).read_text()[:50], []), REFUSED),
    "config.json nested 100,000 deep": (lambda: wrote(CONFIG, '{"a":' * 100_000 + "1" + "}" * 100_000, []), REFUSED),
    "another architecture": (lambda: _json(CONFIG, model_type="gpt2"), REFUSED),
    "an unknown architecture": (lambda: _json(CONFIG, model_type="\x1b[31mnonsense"), REFUSED),
    "a hidden size of 10^9": (lambda: _json(CONFIG, hidden_size=10**9), REFUSED),
    "a hidden size of -8": (lambda: _json(CONFIG, hidden_size=-8), REFUSED),
    "10^9 layers": (lambda: _json(CONFIG, num_hidden_layers=10**9), REFUSED),
    "a vocabulary smaller than the tokenizer's": (lambda: _json(CONFIG, vocab_size=3), REFUSED),
    "positions for 4 tokens": (lambda: _json(CONFIG, max_position_embeddings=4), REFUSED),
    "a padding token beyond the vocabulary": (lambda: _json(CONFIG, pad_token_id=10**6), REFUSED),
    "an unknown activation": (lambda: _json(CONFIG, hidden_act="__import__"), REFUSED),
    "code of its own, called auto_map": (lambda: (_json(CONFIG, auto_map={"AutoConfig": "evil.C", "AutoModelForSequenceClassification": "evil.M"}, model_type="evil"), wrote("bert/evil.py", CODE, [])), REFUSED),
    "a tokenizer with code of its own": (lambda: (_json("bert/tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]}, tokenizer_class="T"), wrote("bert/evil.py", CODE, [])), ANY),
    "a label of control characters": (lambda: _json(CONFIG, id2label={"0": ESC, "1": "b"}), ANY),
    "tokenizer.json cut": (lambda: wrote(TOKENIZER, Path(TOKENIZER).read_text()[:100], []), REFUSED),
    "a token of number 10^9": (lambda: _json(TOKENIZER, model={"type": "WordLevel", "vocab": {"[UNK]": 10**9, "[PAD]": 0}, "unk_token": "[UNK]"}), REFUSED),
    "a tokenizer without an unknown token": (lambda: _json(TOKENIZER, model={"type": "WordLevel", "vocab": {"zzz": 0}, "unk_token": "[UNK]"}), ANY),
    "a tokenizer for 2 tokens": (lambda: _json("bert/tokenizer_config.json", model_max_length=2), REFUSED),
    "a tokenizer for -5 tokens": (lambda: _json("bert/tokenizer_config.json", model_max_length=-5), REFUSED),
    "a tokenizer without padding": (lambda: _json("bert/tokenizer_config.json", pad_token=None), REFUSED),
    "no tokenizer": (lambda: os.unlink(TOKENIZER), REFUSED),
    "weights as a pickle": (partial(_trapped, "pytorch_model.bin"), REFUSED),
    "a pickle called model.safetensors": (partial(_trapped, "model.safetensors"), REFUSED),
    "a header of 2^60 bytes": (lambda: wrote("bert/model.safetensors", struct.pack("<Q", 2**60) + b"{}", []), REFUSED),
    "offsets backwards": (_changed(data_offsets=[8, 0]), REFUSED),
    "offsets beyond the end": (_changed(data_offsets=[0, 2**50]), REFUSED),
    "a negative shape": (_changed(shape=[-1, -8]), REFUSED),
    "a shape of 2^62": (_changed(shape=[2**31, 2**31]), REFUSED),
    "a tensor missing": (lambda: _tensors(lambda h, d: ({k: v for k, v in h.items() if "encoder" not in k}, d)), REFUSED),
    "an index that leads out": (partial(_index, "../shard.safetensors"), ANY),
    "an index that leads nowhere": (partial(_index, "/nowhere/shard.safetensors"), REFUSED),
    "model.safetensors links to /dev/zero": (lambda: (os.unlink("bert/model.safetensors"), os.symlink("/dev/zero", "bert/model.safetensors")), REFUSED),
    "config.json is a named pipe": (lambda: (os.unlink(CONFIG), os.mkfifo(CONFIG)), REFUSED),
    "tokenizer.json links to itself": (lambda: (os.unlink(TOKENIZER), os.symlink("tokenizer.json", TOKENIZER)), REFUSED),
    "a LoRA adapter": (lambda: wrote("bert/adapter_config.json", '{"base_model_name_or_path": "/nowhere"}', []), REFUSED),
}


def models() -> Iterable[Case]:
    """Folders of models and tokenizers, loaded, and streamed from meta."""
    for given, (make, expect) in FOLDERS.items():
        words = [*TEXT, "--model.weights", "bert", "--max_steps", "1"]
        more = ["--max_steps", "30", "--epochs", "30"] if "nan" in given else []
        yield Case("model folder", given, partial(done, make, [*words, *more]), expect)
        if any(word in given for word in ("index that leads", "tensor missing", "offsets", "2^62")):
            meta = [*words, "--memory.init", "meta"]
            yield Case("model folder", f"from meta: {given}", partial(done, make, meta), expect)


# ---------------------------------------------------------------------------------------------------- run directories

STEP = "run/checkpoints/step-00000002"
RESUME = [*FIT, "--run.dir", "run", "--run.resume", "auto", "--max_steps", "3", "--run.allow_change", "[max_steps]"]
LIST, VERIFY, EXPORT = (["checkpoint", action, "run"] for action in ("list", "verify", "export"))
EVALUATE, PREDICT = ["evaluate", "run"], ["predict", "run", "--image", "i.png"]


def forge(**changes: Any) -> None:
    """A manifest with ``changes``, and the hash that belongs to it."""
    from trainer.checkpoint.manifest import read_manifest

    manifest = dataclasses.replace(read_manifest(Path(STEP)), **changes)
    Path(STEP, "manifest.json").write_text(manifest.to_json())


def _entry(name: str) -> None:
    from trainer.checkpoint.manifest import read_manifest

    files = dict(read_manifest(Path(STEP)).files)
    forge(files=files | {name: {"bytes": 8, "sha256": "0" * 64}})


def _said(name: str, text: str | bytes) -> None:
    """Other content of a file of the checkpoint, with the size and hash that belong to it."""
    import hashlib

    from trainer.checkpoint.manifest import read_manifest

    files = dict(read_manifest(Path(STEP)).files)
    raw = text if isinstance(text, bytes) else text.encode()
    manifest = dataclasses.replace(
        read_manifest(Path(STEP)), files=files | {name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}}
    )
    Path(STEP, name).write_bytes(raw)
    Path(STEP, "manifest.json").write_text(manifest.to_json())


def _replaced(path: str, make: Callable[[str], Any]) -> None:
    shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)
    make(path)


def _link(target: str) -> Callable[[str], None]:
    return partial(os.symlink, target)


RUNS: list[tuple[str, Callable[[], Any], list[str], str]] = [
    ("summary.json is garbage", lambda: wrote("run/summary.json", b"\xff\0", []), RESUME, ANY),
    ("recipe.yaml is garbage", lambda: wrote("run/recipe.yaml", b"\xff\0", []), EVALUATE, REFUSED),
    ("recipe.yaml names a recipe that is gone", lambda: wrote("run/recipe.yaml", "recipe: /nowhere/own.py", []), EVALUATE, REFUSED),
    ("recipe.yaml names code in the folder", lambda: (wrote("run/recipe.yaml", "recipe: evil.py", []), wrote("run/evil.py", CODE, [])), PREDICT, REFUSED),
    ("recipe.yaml names code by ..", lambda: (wrote("run/recipe.yaml", "recipe: ../run/evil.py", []), wrote("run/evil.py", CODE, [])), EVALUATE, REFUSED),
    ("recipe.yaml is a named pipe", lambda: _replaced("run/recipe.yaml", os.mkfifo), EVALUATE, REFUSED),
    ("recipe.yaml is a link to /dev/zero", lambda: _replaced("run/recipe.yaml", _link("/dev/zero")), EVALUATE, REFUSED),
    ("model is empty", lambda: _replaced("run/model", os.mkdir), EVALUATE, REFUSED),
    ("model.safetensors is a pickle", lambda: wrote("run/model/model.safetensors", b"cbuiltins\nopen\n(S'../marker'\nS'w'\ntR.", []), EVALUATE, REFUSED),
    ("model.safetensors is a named pipe", lambda: _replaced("run/model/model.safetensors", os.mkfifo), EVALUATE, REFUSED),
    ("model.safetensors links to /dev/zero", lambda: _replaced("run/model/model.safetensors", _link("/dev/zero")), PREDICT, REFUSED),
    ("metrics.csv is binary", lambda: wrote("run/metrics.csv", os.urandom(10_000), []), RESUME, RAN),
    ("metrics.csv of the checkpoint is garbage", lambda: _said("metrics.csv", b"\xff\0\n" * 100), RESUME, ANY),
    ("metrics.csv of the checkpoint has another header", lambda: _said("metrics.csv", "step,loss\n1,2\n"), RESUME, ANY),
    ("metrics.csv is a link to the victim", lambda: _replaced("run/metrics.csv", _link("../../victim")), RESUME, RAN),
    ("recipe.yaml is a link to the victim", lambda: _replaced("run/recipe.yaml", _link("../../victim")), RESUME, ANY),
    ("supervisor.json is a link to the victim", lambda: os.symlink("../../victim", "run/supervisor.json"), ["run", "--restarts", "0", "--", "own.py", "--run.dir", "run", "--batch_size", "x"], ANY),
    ("model is a link to a folder elsewhere", lambda: _replaced("run/model", _link("../bert")), RESUME, ANY),
    ("checkpoints is a link to itself", lambda: _replaced("run/checkpoints", _link("checkpoints")), RESUME, REFUSED),
    ("checkpoints is a file", lambda: _replaced("run/checkpoints", lambda path: wrote(path, "x", [])), RESUME, REFUSED),
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
    ("a manifest that links to itself", lambda: _replaced(f"{STEP}/manifest.json", _link("manifest.json")), LIST, RAN),
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
    (".run.lock is a named pipe", lambda: _replaced("run/.run.lock", os.mkfifo), RESUME, REFUSED),
    (".run.lock is garbage", lambda: wrote("run/.run.lock", b"\xff\0{", []), RESUME, RAN),
    (".run.lock is a second name of the victim", lambda: _replaced("run/.run.lock", partial(os.link, "../victim")), RESUME, ANY),
    ("supervisor.json is garbage", lambda: wrote("run/supervisor.json", b"\xff\0{", []), ["run", "--restarts", "0", "--", "own.py", "--run.dir", "run", "--batch_size", "x"], ANY),
    ("bad_samples.json is a link to the victim", lambda: os.symlink("../../victim", "run/bad_samples.json"), RESUME, ANY),
]


def runs() -> Iterable[Case]:
    """Run directories and checkpoints."""
    for given, make, words, expect in RUNS:
        build = partial(done, make, words)
        picture = partial(lambda build: wrote("i.png", _picture(mode="L"), build()), build)
        yield Case("run directory", given, picture, expect)


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


# ------------------------------------------------------------------------------------------------------ environment

VARIABLES: list[tuple[dict[str, str | None], str]] = [
    ({"HOME": None}, RAN),
    ({"HOME": "nowhere"}, RAN),
    ({"TMPDIR": "nowhere"}, RAN),
    ({"TMPDIR": "/proc"}, RAN),
    ({"COLUMNS": "0"}, RAN),
    ({"COLUMNS": "abc"}, RAN),
    ({"COLUMNS": "-5"}, RAN),
    ({"MASTER_ADDR": "nonsense\x1b[31m", "MASTER_PORT": "abc"}, REFUSED),
    ({"WANDB_MODE": "nonsense"}, RAN),
    ({"NODE_RANK": "abc"}, ANY),
    ({"LOCAL_WORLD_SIZE": "2"}, ANY),
    ({"WORLD_SIZE": "2"}, ANY),
    ({"SLURM_JOB_ID": "x", "SLURM_NTASKS": "abc", "SLURM_PROCID": "0"}, ANY),
    ({"TRAINER_PLANNED": "{"}, ANY),
    ({"TRAINER_PLANNED": "[1]"}, ANY),
    ({"PYTORCH_CUDA_ALLOC_CONF": "nonsense"}, ANY),
    ({"USER": None, "LOGNAME": None}, RAN),
]
FRESH: list[tuple[dict[str, str | None], str]] = [
    ({"MPLBACKEND": "nonsense"}, RAN),
    ({"MPLCONFIGDIR": "nowhere/x", "HOME": "nowhere"}, RAN),
    ({"HF_HOME": "own.py"}, RAN),
    ({"PYTHONWARNINGS": "error"}, RAN),
    ({"OMP_NUM_THREADS": "abc"}, RAN),
    ({"OMP_NUM_THREADS": "-1", "MKL_NUM_THREADS": "0"}, RAN),
    ({"CUDA_VISIBLE_DEVICES": "abc"}, RAN),
    ({"LANG": "nonsense.UTF-9", "LC_ALL": "nonsense"}, RAN),
    ({"PYTHONIOENCODING": "ascii"}, RAN),
    ({"TORCH_LOGS": "nonsense"}, ANY),
    ({"TORCH_COMPILE_DEBUG": "abc", "TORCH_HOME": "own.py", "TORCH_NUM_THREADS": "x"}, RAN),
    ({"PYTHONOPTIMIZE": "2"}, RAN),
]


def environment() -> Iterable[Case]:
    """Variables."""
    for rows, fresh in ((VARIABLES, False), (FRESH, True)):
        for env, expect in rows:
            given = " ".join(f"{key}={value}" if value is not None else f"no {key}" for key, value in env.items())
            yield Case("environment", given, partial(list, [*FIT, "--run.evaluate", "true"]), expect, "", env, fresh)


def cases() -> list[Case]:
    """All of them."""
    made = (command_line, yaml, recipes, tables, images, models, runs, predict, environment)
    return [case for make in made for case in make()]
