"""Recipe files with faults of their own: models, losses and datasets."""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from hostile_cases.case import (
    ANY,
    ESC,
    EVALUATED,
    FIT,
    OWN,
    RAN,
    REFUSED,
    Case,
    done,
    no_file,
    own,
    wrote,
)

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
    yield Case("recipe file", "imports one that imports it", lambda: wrote("a.py", pair, wrote("own.py", "import a", FIT)))
    for given, make in no_file("odd.py").items():
        yield Case("recipe file", given, partial(done, partial(make, "odd.py"), ["fit", "odd.py"]))
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
