"""Command lines, YAML files and environment variables."""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import partial

from hostile_cases.case import (
    ANY,
    ESC,
    FIT,
    RAN,
    REFUSED,
    Case,
    done,
    no_file,
    wrote,
)

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
    yield Case("YAML", "a recipe.yaml that names no recipe", partial(wrote, "x.yaml", "seed: 1", fit), REFUSED, "recipe")
    yield Case("YAML", "a recipe.yaml that names itself", partial(wrote, "x.yaml", "recipe: x.yaml", fit))
    for given, make in (no_file("x.yaml") | {"a folder x.yaml": os.mkdir}).items():
        says = "" if "link" in given else "x.yaml"
        yield Case("YAML", given, partial(done, partial(make, "x.yaml"), fit), REFUSED, says)


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
    ({"TORCH_HOME": "own.py", "TORCH_NUM_THREADS": "x"}, RAN),
    ({"TORCH_COMPILE_DEBUG": "abc"}, REFUSED),  # torch itself cannot be imported with it
    ({"PYTHONOPTIMIZE": "2"}, RAN),
]


def environment() -> Iterable[Case]:
    """Variables."""
    for rows, fresh in ((VARIABLES, False), (FRESH, True)):
        for env, expect in rows:
            given = " ".join(f"{key}={value}" if value is not None else f"no {key}" for key, value in env.items())
            yield Case("environment", given, partial(list, [*FIT, "--run.evaluate", "true"]), expect, "", env, fresh)
