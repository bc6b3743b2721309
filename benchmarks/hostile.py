"""What does the trainer do with inputs that somebody made to harm it? Every case of ``hostile_cases.py``, one by one.

A process that has imported everything forks one child a case, which calls ``trainer`` in a folder of its own, with a
limit of memory, and is watched: what it prints, its exit code, its seconds, its memory over that of the idle process.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")  # as the command line does

from chaos.forks import children, fork, in_forks
from common import RESULTS, Record, process_memory, table, workplace
from hostile_cases import cases
from hostile_cases.case import ANY, CONVERSATIONS, GOOD, OWN, RAN, REFUSED, SPOKEN, TALKED, Case, own, wrote

PRELOADED = [
    "trainer.api",
    "trainer.commands.flags",
    "trainer.commands.doctor",
    "trainer.commands.plan",
    "trainer.lab.ladder",
    "trainer.commands.checkpoint",
    "trainer.supervise.supervisor",
    "trainer.data.image_splits",
    "trainer.data.tokens",
    "trainer.data.text",
    "trainer.data.shards",
    "trainer.models.text",
    "matplotlib.pyplot",
    "sklearn.datasets",
    "sklearn.metrics",
    "torchvision.datasets",
    "transformers.models.bert.modeling_bert",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "trainer.lab.sweep",
    "trainer.lab.list_runs",
    "trainer.data.language",
    "trainer.data.language_samples",
    "trainer.models.causal",
    "trainer.after.export",
    "optuna",
    "peft",
    "datasets",
    "pyarrow.parquet",
    "pyarrow.dataset",
]
"""What runs import: once here instead of once a case."""

SECONDS, IDLE, SLOW = 120.0, 20.0, 30.0
"""After which a case is killed; after how many without any work it is; and of a processor, on busy machines, too."""
MEMORY, LARGE = 3e9, 1e9
"""Bytes beyond the idle process that a case may allocate; more than which, in use, it has failed."""
PRECIOUS = "precious\n"
FAILED = "FAILED"

ERROR = re.compile(r"^(\[rank \d+\] )?trainer: error: ")
TRACEBACK = "Traceback (most recent call last)"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What must not be printed raw; tabs and newlines are meant, or are looked for as forged lines."""


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="categories, with commas, in the order in which they are tried")
    parser.add_argument("--cases", help="numbers, with commas or as 10-20")
    parser.add_argument("--work", type=Path, help="folder for the cases, which is kept")
    parser.add_argument("--list", action="store_true", help="print the cases only")
    parser.add_argument("--failed", action="store_true", help="show what failed only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the file of results")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else []
    chosen = [
        (number, case)
        for number, case in enumerate(cases())
        if (not only or case.category in only) and (not options.cases or number in numbers(options.cases))
    ]
    chosen.sort(key=lambda one: only.index(one[1].category) if only else 0)
    if options.list:
        print("\n".join(f"{number} {case.category}: {shown(case.given)}" for number, case in chosen))
        return
    for module in PRELOADED:
        import_module(module)
    import torch

    from trainer.report.plots import plot_curves

    torch.set_num_threads(1)
    record = Record("hostile", {}, options.results)
    rows = {} if not (options.only or options.cases) else earlier(record.path)
    with workplace(options.work) as folder:
        base = prepared(folder)
        plot_curves(base / "run" / "metrics.csv", folder / "curves.png")  # the first picture takes a second longer
        gc.collect()
        gc.freeze()  # else every child copies what it never uses
        for number, case in chosen:
            found = rows[case.category, shown(case.given)] = tried(case, base, folder / f"case-{number}")
            if not options.work:
                shutil.rmtree(folder / f"case-{number}", ignore_errors=True)
            if found["verdict"] == FAILED:
                print(f"{number} {case.category}: {found['given']}: {found['why']}", file=sys.stderr, flush=True)
            record.write(rows=list(rows.values()))
    gc.unfreeze()
    known = [(case.category, shown(case.given)) for case in cases()]
    ordered = [rows[key] for key in known if key in rows]
    record.write(complete=len(ordered) == len(known), rows=ordered, counts=counted(ordered))
    report(ordered, options.failed)


def earlier(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of an earlier run, of which some cases are now tried again."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["category"], row["given"]): row for row in rows}


def numbers(text: str) -> set[int]:
    """``1,4,10-20`` as numbers."""
    found: set[int] = set()
    for word in text.split(","):
        first, _, last = word.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def report(rows: Sequence[Mapping[str, Any]], failed_only: bool) -> None:
    """Print the tables: every case, and how many of each verdict."""
    cells = [
        [
            f"{row['category']}: {row['given']}",
            str(row["code"]),
            row["printed"].replace("|", "\\|"),
            f"{row['seconds']:.1f}",
            f"{row['extra_mb']:.0f}",
            row["verdict"] + (f": {row['why']}" if row["why"] else ""),
        ]
        for row in rows
        if row["verdict"] == FAILED or not failed_only
    ]
    print(table(["given", "exit code", "printed first", "seconds", "MB", "verdict"], cells))
    verdicts = ("refused", "ran", FAILED)
    groups = [[name, *(str(found.get(one, 0)) for one in verdicts)] for name, found in counted(rows).items()]
    print("\n" + table(["category", *verdicts], groups))


def counted(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """How many of each verdict, by category and in all."""
    groups: dict[str, Counter[str]] = {}
    for row in rows:
        for name in (row["category"], "all"):
            groups.setdefault(name, Counter())[row["verdict"]] += 1
    groups["all"] = groups.pop("all", Counter())
    return {name: dict(found) for name, found in groups.items()}


# ------------------------------------------------------------------------------------------------------- what is there


def prepared(folder: Path) -> Path:
    """The folder that every case gets a copy of."""
    base = folder / "base"
    base.mkdir()
    dict(in_forks([partial(_prepare, base)], 1))
    return base


def _prepare(base: Path) -> None:
    os.chdir(base)
    run = "run=Run(dir='run', predict=False, evaluate=False)"
    saved = f"{run}, max_steps=2, checkpoint=Checkpoint(every=1, asynchronous=False)"
    wrote("own.py", own(), [])
    wrote("own_run.py", own(more=saved), [])
    wrote("t.csv", GOOD, [])
    wrote("text.py", SPOKEN, [])
    wrote("chat.py", TALKED, [])
    wrote("chat.jsonl", CONVERSATIONS, [])
    _bert(Path("bert"))
    _llama(Path("llama"))
    from trainer.cli import run as trainer

    adapted = ["chat.py", "--run.dir", "adapted", "--model.lora.rank", "2"]
    for words in (["own_run.py"], ["text.py", "--run.dir", "spoken"], ["chat.py", "--run.dir", "talked"], adapted):
        if trainer(["fit", *words]):
            raise RuntimeError(f"the run that the cases begin with failed: {words}")


def _bert(folder: Path) -> None:
    """A tiny BERT with random weights, and a tokenizer of ten words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "good", "bad", "film", "a", "the", "not", "very", "x"]
    tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(10), strict=True)), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )
    sizes: dict[str, int] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def _llama(folder: Path) -> None:
    """Save a tiny Llama with random weights, the tokenizer of bytes and a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainer.data.language_samples import CHATML
    from trainer.models.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    sizes: dict[str, int] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, int] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------------------------------------------------- one case


def tried(case: Case, base: Path, folder: Path) -> dict[str, Any]:
    """Run a case; what it printed, took and left, and whether that is right."""
    here = folder / "here"
    shutil.copytree(base, here, symlinks=True)
    (folder / "victim").write_text(PRECIOUS)
    out, err = folder / "out", folder / "err"
    began = time.monotonic()
    pid = fork(partial(_fresh if case.fresh else _called, case, here, err, folder / "idle"), out)
    status, usage, peak, in_time = _waited(pid, began)
    seconds = time.monotonic() - began
    built = folder / "idle"
    start, worked, idle = map(float, built.read_text().split()) if built.exists() else (began, 0.0, 0.0)
    code = os.waitstatus_to_exitcode(status)
    printed, said = (path.read_bytes() if path.exists() else b"" for path in (out, err))
    first = _first_line(said) or _first_line(printed)
    found = {
        "category": case.category,
        "given": shown(case.given),
        "expected": case.expect,
        "code": code,
        "printed": shown(first.replace(f"{here}/", "").replace(str(base), "…"), 160),
        "seconds": round(seconds - (start - began), 2),
        "processor": round(usage.ru_utime + usage.ru_stime - worked, 2),
        "extra_mb": round(max(0.0, usage.ru_maxrss * 1024 - idle, peak - idle) / 1e6, 1) if idle else 0.0,
    }
    why = _fault(case, found, printed, said, in_time)
    if why is None and not built.exists():
        why = "the harness could not build it"
    if why is None and ((folder / "victim").read_text() != PRECIOUS or (folder / "marker").exists()):
        why = "the victim was changed" if not (folder / "marker").exists() else "CODE WAS EXECUTED"
    verdict = FAILED if why else "ran" if code == 0 else "refused"
    return {**found, "verdict": verdict, "why": why or ""}


def _called(case: Case, here: Path, err: Path, idle: Path) -> int:
    """In the child: build the case, and call ``trainer`` as its script does."""
    words = _begun(case, here, err)
    sys.argv = ["trainer", *words]
    from trainer.cli import entry
    from trainer.system.streams import install_safe_streams

    install_safe_streams()  # before libraries are imported, as in a process of its own
    for logger in (logging.getLogger(name) for name in ("transformers", "datasets", "huggingface_hub")):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)

    limit = process_memory("VmData") + int(MEMORY)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    idle.write_text(f"{time.monotonic()} {time.process_time()} {process_memory('VmRSS')}")
    try:
        entry()
    except SystemExit as error:  # as Python ends for one
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    return 0


def _fresh(case: Case, here: Path, err: Path, idle: Path) -> int:
    """The same in an interpreter of its own."""
    words = _begun(case, here, err)
    idle.write_text(f"{time.monotonic()} {time.process_time()} {process_memory('VmRSS')}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.RLIM_INFINITY))
    return subprocess.run([Path(sys.executable).with_name("trainer"), *words], stdin=subprocess.DEVNULL).returncode


def _begun(case: Case, here: Path, err: Path) -> list[str]:
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(here)
    words = case.build()
    for key, value in case.env.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value
    tempfile.tempdir = None  # that of TMPDIR
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    return words


def _waited(pid: int, began: float) -> tuple[int, resource.struct_rusage, int, bool]:
    """Wait for a child; kill it, and whatever it has started, when it takes too long or does nothing for long.

    Its peak of memory is read meanwhile: a run that measures its phases resets the kernel's.
    """
    in_time, worked, since, peak = True, 0, began, 0
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            break
        with suppress(OSError, StopIteration):
            peak = max(peak, process_memory("VmHWM", pid))
        now = time.monotonic()
        if (ticks := sum(map(_ticks, [pid, *children(pid)]))) != worked:
            worked, since = ticks, now
        if now > min(began + SECONDS, since + IDLE) or worked > 1.5 * SLOW * os.sysconf("SC_CLK_TCK"):
            in_time = False
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return status, usage, peak, in_time


def _ticks(pid: int) -> int:
    """What a process has worked, in the kernel's ticks."""
    try:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    except OSError:
        return 0


def _fault(case: Case, found: Mapping[str, Any], out: bytes, err: bytes, in_time: bool) -> str | None:
    """What is wrong with what a case did, if anything."""
    code = found["code"]
    if not in_time:
        return f"no end: killed after {found['seconds']:.0f} s"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if found["processor"] > SLOW:
        return f"took more than {SLOW:.0f} s of a processor"
    if found["extra_mb"] > LARGE / 1e6:
        return f"took more than {LARGE / 1e9:.0f} GB"
    if (steering := _steering(out + err)) is not None:
        return f"printed {steering} raw"
    return _wrong_end(case, code, err.decode(errors="replace"), out.decode(errors="replace"))


def _wrong_end(case: Case, code: int, err: str, out: str) -> str | None:
    errors = [line for line in err.splitlines() if ERROR.match(line)]
    if any(line.startswith("trainer: error: forged") for line in (out + err).splitlines()):
        return "printed a forged line"
    if case.expect in (RAN, ANY) and code == 0:
        if TRACEBACK in out + err:
            return "ran, but printed a traceback"
        if case.expect == RAN and case.says not in out:
            return f"does not print {case.says!r}"
        return "ran, but printed an error" if errors else None
    if code not in ((1, 2) if case.code is None else (case.code,)):
        return f"exit code {code}, expected {case.expect}"
    if not errors:
        return "a traceback" if TRACEBACK in out + err else "not a word"
    if TRACEBACK in out or (TRACEBACK in err and (case.expect != OWN or err.index(errors[0]) > err.index(TRACEBACK))):
        return "a traceback"
    if case.expect == RAN:
        return "refused, expected to run"
    if case.expect == REFUSED and case.says not in errors[0]:
        return f"does not say {case.says!r}"
    return None


def _steering(text: bytes) -> str | None:
    """The first control character in what was printed, if there is one."""
    try:
        found = STEERING.search(text.decode())
    except UnicodeDecodeError:
        return "bytes that are no UTF-8"
    return f"U+{ord(found[0]):04X}" if found else None


def _first_line(text: bytes) -> str:
    """The line of the error, or the first."""
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if ERROR.match(line)), lines[0] if lines else "")


def shown(text: str, most: int = 80) -> str:
    """Any text in one short line."""
    text = text.encode("unicode_escape", "surrogatepass").decode("ascii")
    return text if len(text) <= most else f"{text[: most - 1]}…"


if __name__ == "__main__":
    main()
