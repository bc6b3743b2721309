"""Sweeps with odd flags or a forged ``sweep.json``, mixtures of datasets, and folders of data files."""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hostile_cases.case import ANY, CODE, ESC, GOOD, RAN, REFUSED, TEXT_MODEL, Case, done, no_file, own, replaced, wrote
from hostile_cases.chat import nested

OVER = "optim.lr=0.001..1.0"
WORDS = ["own.py", "--run.evaluate=true", "--data.val_fraction=0.3", "--run.accelerator=cpu"]
SWEEP = ["sweep", *WORDS, f"--over={OVER}", "--out=s", "--trials=2"]
FLAGS: list[tuple[list[str], str]] = [
    *[([f"--over={text}"], REFUSED) for text in ("", "=", "optim.lr=", "optim.lr=1", "optim.lr=nan..1", "optim.lr=0..inf", "optim.lr=1..1e400", "optim.lr=-1..1", "optim.lr=1..2..3", "optim.lr=a..b", "optim.lr=,,", "optim.name=sgd,nonsense", "batch_size=1..1" + "0" * 30, f"{ESC}=1,2", f"optim.lr=1,{ESC}", "run.dir=a,b", "run.best=loss,accuracy", "model=MLP,os.system")],
    ([f"--over={OVER}", "--over=optim.lr=1,2", "--trials=1"], REFUSED),
    ([f"--over=model.hidden={','.join(f'[{n}]' for n in range(1, 200))}", "--trials=0"], REFUSED),
    *[([f"--over={OVER}", f"--trials={text}"], REFUSED) for text in ("0", "-1", "x", "1e3", "1.5")],
    *[([f"--over={OVER}", f"--parallel={text}"], REFUSED) for text in ("0", "-1", "x", "1000000000")],
    *[([f"--folds={text}"], REFUSED) for text in ("0", "1", "-3", "x", "1000000000")],
    (["--folds=2", f"--over={OVER}"], REFUSED), (["--find-lr", "--trials=3"], REFUSED), ([f"--over={OVER}", "--run.dir=x"], REFUSED), ([f"--over={OVER}", "--run.best=nonsense"], REFUSED),
]
OUTS = {"a file": "own.py", "below a file": "own.py/x", "in /proc": "/proc/x", "with escapes": f"/proc/{ESC}", "of 5,000 letters": "x" * 5000, "of the victim": "../victim"}
ROW = {"number": 1, "settings": {"optim.lr": 0.1}, "status": "finished", "reason": None, "scores": [0.5], "score": 0.5, "figure": "val_accuracy", "value": 0.5, "step": 1, "seconds": 1.0}
BIG = "1" + "0" * 400


def _sweep(*rows: dict[str, Any], **top: Any) -> str:
    trials = [{**ROW, "number": number, **row} for number, row in enumerate(rows, start=1)]
    return json.dumps({"command": WORDS, "over": [OVER], "figure": "val_accuracy", **top, "trials": trials})


def _all(**changes: Any) -> str:
    return _sweep({}, changes)


FORGED: dict[str, tuple[str | bytes, str]] = {
    "as it is": (_sweep({}, {}), RAN), "binary": (b"\xff\0", REFUSED), "a list": ("[]", REFUSED), "nested deep": ('{"a":' * 100_000, REFUSED), "65 MB": ('{"a": "' + "x" * 70_000_000 + '"}', REFUSED), "empty": ("", REFUSED),
    "trials that are a number": (_sweep().replace('"trials": []', '"trials": 5'), REFUSED), "trials that are a mapping": (_sweep().replace('"trials": []', '"trials": {"a": 1}'), REFUSED), "trials of numbers": (_sweep().replace('"trials": []', '"trials": [1, 2]'), REFUSED),
    "trials of null": (_sweep().replace('"trials": []', '"trials": [null]'), REFUSED), "another command": (_sweep({}, {}, command=["other.py"]), REFUSED), "another range": (_sweep({}, {}, over=["optim.lr=1..2"]), REFUSED), "a command with escapes": (_sweep({}, {}, command=[ESC]), REFUSED),
    "a row without a score": (_sweep({}).replace('"score": 0.5, ', ""), REFUSED), "a score of 400 digits": (_all(score=0.123).replace("0.123", BIG), REFUSED), "scores of 400 digits": (_all(scores=[0.123]).replace("0.123", BIG), ANY), "a value of 400 digits": (_all(value=0.123).replace("0.123", BIG), ANY),
    "a score of NaN": (_all(score=float("nan")), ANY), "a score of Infinity": (_all(score=float("inf")), ANY), "a value of NaN": (_all(value=float("nan")), ANY), "scores that are texts": (_all(scores=["x"]), REFUSED), "scores that are lists": (_all(scores=[[1]]), REFUSED),
    "a score that is true": (_all(score=True, scores=[True]), ANY), "a score that is a text": (_all(score="0.5"), REFUSED), "no score, and finished": (_all(score=None), REFUSED), "a million scores": (_all(scores=[0.5] * 300_000), ANY),
    "a number of 400 digits": (_all(number=10**400), ANY), "a number that is negative": (_all(number=-5), ANY), "a number that is a text": (_all(number="1"), REFUSED), "a number twice": (_all(number=1), ANY),
    "settings of another key": (_all(settings={"optim.momentum": 0.5}), REFUSED), "settings of two keys": (_all(settings={"optim.lr": 0.5, "run.dir": "../victim"}), REFUSED), "settings of nothing": (_all(settings={}), REFUSED), "settings that are a list": (_all(settings=[1]), REFUSED),
    "a setting out of range": (_all(settings={"optim.lr": 5.0}), REFUSED), "a setting that is a text": (_all(settings={"optim.lr": "0.1"}), ANY), "a setting of NaN": (_all(settings={"optim.lr": float("nan")}), REFUSED), "a setting that is a mapping": (_all(settings={"optim.lr": {"a": 1}}), REFUSED),
    "a status of nonsense": (_all(status="nonsense"), ANY), "a status with escapes": (_all(status=ESC), ANY), "a reason with escapes": (_all(status="failed", score=None, value=None, reason=f"{ESC}\ntrainer: error: forged"), ANY), "a column with escapes": (_all(figure=ESC), ANY), "a step of 10^300": (_all(step=1e300), ANY),
    "unfinished, with a text for a number": (_all(status="running", settings={"optim.lr": "x"}, score=None), REFUSED), "unfinished, with a flag in its settings": (_all(status="running", settings={"optim.lr": "0.1 --run.dir=../victim"}, score=None), REFUSED),
    "unfinished, with another key": (_all(status="running", settings={"data.root": "/"}, score=None), ANY), "unfinished, out of range": (_all(status="running", settings={"optim.lr": 1e9}, score=None), ANY), "unfinished, without settings": (_all(status="running", settings={}, score=None), ANY),
    "unfinished, of a number that leads out": (_all(status="running", number="../../victim", score=None), REFUSED), "300 trials": (_sweep(*[{}] * 300), ANY),
}


def sweeps() -> Iterable[Case]:
    """Flags, folders and files of ``trainer sweep``."""
    for flags, expect in FLAGS:
        yield Case("sweep", " ".join(flags), partial(list, ["sweep", *WORDS, "--out=s", *flags]), expect, code=2)
    for given, out in OUTS.items():
        yield Case("sweep", f"an output {given}", partial(list, [*SWEEP, f"--out={out}"]), REFUSED, code=2)
    for given, (text, expect) in FORGED.items():
        yield Case("sweep", f"sweep.json: {given}", partial(wrote, "s/sweep.json", text, SWEEP), expect, code=2)
    for given, make in (no_file("sweep.json") | {"a folder": os.mkdir}).items():
        yield Case("sweep", f"sweep.json: {given}", lambda make=make: done(lambda: (os.mkdir("s"), replaced("s/sweep.json", make)), SWEEP), REFUSED, code=2)


# ------------------------------------------------------------------------------------------------------------ mixtures

DIGITS = "[Digits, {}, 1]"
PARTS: dict[str, tuple[str, str]] = {
    "as it should be": (f"[{DIGITS}, {DIGITS}]", RAN), "nothing": ("[]", REFUSED), "null": ("null", REFUSED), "a text": ("Digits", REFUSED), "a mapping": ("{a: 1}", REFUSED), "numbers": ("[1, 2]", REFUSED), "empty parts": ("[[]]", REFUSED),
    "parts of one": ("[[Digits]]", REFUSED), "parts of four": ("[[Digits, {}, 1, 2]]", REFUSED), "a part in a part": (f"[[{DIGITS}, 1]]", REFUSED), "an unknown class": ("[[Nonsense, {}, 1]]", REFUSED), "a mixture": (f"[[Mixture, {{parts: [{DIGITS}]}}, 1]]", REFUSED),
    "a function of another module": ("[[os.system, {command: 'touch ../marker'}, 1]]", REFUSED), "a class with escapes": (f'[["{json.dumps(ESC)[1:-1]}", {{}}, 1]]', REFUSED), "an unknown setting": ("[[Digits, {nonsense: 1}, 1]]", REFUSED), "settings that are a list": ("[[Digits, [1], 1]]", REFUSED),
    "settings of another key type": ("[[Digits, {1: 2}, 1]]", REFUSED), "no required setting": ("[[ImageFolder, {}, 1]]", REFUSED), "a root that is a number": ("[[ImageFolder, {root: 5}, 1]]", REFUSED), "a root that is null": ("[[ImageFolder, {root: null}, 1]]", REFUSED),
    "a root that is a list": ("[[ImageFolder, {root: [a]}, 1]]", REFUSED), "a size that is a text": ("[[Digits, {image_size: x}, 1]]", REFUSED), "a size of 10^9": ("[[Digits, {image_size: 1000000000}, 1]]", REFUSED), "a fraction that is a list": ("[[Digits, {val_fraction: [1]}, 1]]", REFUSED),
    "a path that is a number": ("[[CIFAR10, {root: 5}, 1]]", REFUSED), "files that are a number": ("[[TextFiles, {train_file: 5}, 1]]", REFUSED), "documents that are a mapping": ("[[Documents, {train_files: {a: 1}}, 1]]", REFUSED), "names that are a number": ("[[HubText, {name: 5}, 1]]", REFUSED),
    **{f"a weight of {weight}": (f"[[Digits, {{}}, {weight}], {DIGITS}]", REFUSED) for weight in ("0", "-1", ".nan", ".inf", "true", "x", "null", "[1]", "1" + "0" * 400)},
    "weights that sum to infinity": ("[[Digits, {}, 1.0e+308], [Digits, {}, 1.0e+308]]", REFUSED), "weights of 1e-320": ("[[Digits, {}, 1.0e-320], [Digits, {}, 1.0e-320]]", ANY), "weights of 1e300 and 1e-300": ("[[Digits, {}, 1.0e+300], [Digits, {}, 1.0e-300]]", ANY),
    "parts of two sizes": ("[[Digits, {}, 1], [Digits, {image_size: 16}, 1]]", REFUSED), "300 parts": ("[" + ",".join([DIGITS] * 300) + "]", ANY), "images and texts": ("[[Digits, {}, 1], [TextFiles, {train_file: t.csv}, 1]]", REFUSED),
}


def mixtures() -> Iterable[Case]:
    """Parts of a mixture, by a flag."""
    for given, (parts, expect) in PARTS.items():
        yield Case("mixture", given, partial(list, ["fit", "own.py", "--data", "Mixture", "--data.parts", parts]), expect, code=2)


# -------------------------------------------------------------------------------------------------- folders of datasets

def _zipped(files: dict[str, bytes | int]) -> bytes:
    """Return a zip archive; a number stands for as many bytes of rows."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            with archive.open(name, "w", force_zip64=True) as member:
                if isinstance(content, bytes):
                    member.write(content)
                    continue
                member.write(b"text,label\n")
                for _ in range(content // 2**20):
                    member.write(b"good,1\nbad!,0\n" * (2**20 // 14))
    return buffer.getvalue()


def _tarred(names: Iterable[str], content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


PICKLE = b"cbuiltins\nopen\n(S'../marker'\nS'w'\ntR."


def _gzip_bomb() -> bytes:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="w") as file:
        file.write(b"text,label\n")
        for _ in range(700):
            file.write(b"good,1\nbad!,0\n" * (2**20 // 14))
    return buffer.getvalue()


FOLDERS: dict[str, tuple[Callable[[], Any], str]] = {
    "as it should be": (lambda: wrote("h/train.csv", GOOD, []), RAN),
    "a zip of 720 MB": (lambda: wrote("h/train.zip", _zipped({"train.csv": 720 * 2**20}), []), REFUSED),
    "a small zip": (lambda: wrote("h/train.zip", _zipped({"train.csv": GOOD.encode()}), []), REFUSED),
    "a zip called train.csv": (lambda: wrote("h/train.csv", _zipped({"train.csv": 720 * 2**20}), []), REFUSED),
    "a zip in a zip": (lambda: wrote("h/train.zip", _zipped({"train.zip": _zipped({"train.csv": GOOD.encode()})}), []), REFUSED),
    "a zip that leads out": (lambda: wrote("h/train.zip", _zipped({"../../../victim": b"x", "train.csv": GOOD.encode()}), []), REFUSED),
    "a gzip of 700 MB": (lambda: wrote("h/train.csv.gz", _gzip_bomb(), []), REFUSED),
    "a gzip called train.csv": (lambda: wrote("h/train.csv", _gzip_bomb(), []), REFUSED),
    "a small gzip": (lambda: wrote("h/train.csv.gz", gzip.compress(GOOD.encode()), []), REFUSED),
    "a tar of pickles": (lambda: wrote("h/train.tar", _tarred(["0.pickle", "0.txt", "1.pyd", "1.txt"], PICKLE), []), REFUSED),
    "a tar that leads out": (lambda: wrote("h/train.tar.gz", _tarred(["../../victim", "/tmp/x.csv"], b"x"), []), REFUSED),
    "an archive in a folder within": (lambda: (wrote("h/train.csv", GOOD, []), wrote("h/data/train/more.zip", _zipped({"train.csv": GOOD.encode()}), [])), REFUSED),
    "a pickle": (lambda: wrote("h/train.pkl", PICKLE, []), REFUSED),
    "a pandas pickle beside a table": (lambda: (wrote("h/train.csv", GOOD, []), wrote("h/train.pickle", PICKLE, [])), ANY),
    "a script of its name": (lambda: (wrote("h/h.py", CODE, []), wrote("h/train.csv", GOOD, [])), ANY),
    "a script only": (lambda: wrote("h/h.py", CODE, []), REFUSED),
    "a card that leads out": (lambda: (wrote("h/README.md", "---\nconfigs:\n- config_name: default\n  data_files: ../../../../etc/passwd\n---\n", []), wrote("h/train.csv", GOOD, [])), ANY),
    "a card with an object": (lambda: (wrote("h/README.md", "---\nx: !!python/object/apply:builtins.open ['../marker', 'w']\n---\n", []), wrote("h/train.csv", GOOD, [])), ANY),
    "a card of aliases": (lambda: (wrote("h/README.md", "---\na: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)) + "---\n", []), wrote("h/train.csv", GOOD, [])), ANY),
    "dataset_infos.json is garbage": (lambda: (wrote("h/dataset_infos.json", b"\xff\0", []), wrote("h/train.csv", GOOD, [])), ANY),
    "a saved data set of garbage": (lambda: (wrote("h/state.json", "{}", []), wrote("h/dataset_info.json", "{}", []), wrote("h/data-00000-of-00001.arrow", b"ARROW1\0\0garbage", [])), REFUSED),
    "an arrow file of garbage": (lambda: wrote("h/train.arrow", b"ARROW1\0\0garbage", []), REFUSED),
    "a Parquet file of nested texts": (lambda: wrote("h/train.parquet", nested("texts", 2_000_000, 1000), []), REFUSED),
    "an HDF5 file of garbage": (lambda: wrote("h/train.h5", b"\x89HDF\r\n\x1a\ngarbage", []), REFUSED),
    "an XML file of entities": (lambda: wrote("h/train.xml", '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">' + "".join(f'<!ENTITY {new} "{f"&{old};" * 10}">' for old, new in zip("abcdefgh", "bcdefghi", strict=True)) + "]><x>&i;</x>", []), REFUSED),
    "nothing": (lambda: os.mkdir("h"), REFUSED),
    "a named pipe": (lambda: (os.mkdir("h"), os.mkfifo("h/train.csv")), REFUSED),
    "a link to /dev/zero": (lambda: (os.mkdir("h"), os.symlink("/dev/zero", "h/train.csv")), REFUSED),
    "a link to itself": (lambda: (os.mkdir("h"), os.symlink("train.csv", "h/train.csv")), REFUSED),
    "a loop of folders": (lambda: (wrote("h/train.csv", GOOD, []), os.symlink("..", "h/up")), ANY),
    "a name with escapes": (lambda: wrote(f"h/train{ESC}.csv".replace("\x1b[2J", ""), b"\xff\0", []), REFUSED),
    "a line of JSON nested deep": (lambda: wrote("h/train.jsonl", '{"text": ' + "[" * 50_000, []), REFUSED),
}


def hub_folders() -> Iterable[Case]:
    """Folders that ``datasets.load_dataset`` reads."""
    source = own(TEXT_MODEL, "HubText('./h', test_split=None, cache_dir='cache', max_length=8)", "batch_size=2")
    for given, (make, expect) in FOLDERS.items():
        yield Case("hub folder", given, lambda make=make: done(make, wrote("own.py", source, ["fit", "own.py"])), expect, code=2)
