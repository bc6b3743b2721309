"""What a command costs before it has anything to show: CPU seconds to the first step of ``fit``, and to the end of
``predict``, ``evaluate`` and ``plan``, beside importing what each cannot do without; and when its first line comes.

``python benchmarks/start.py --rounds 3 [--beside CHECKOUT]``: five minutes on two cores, twice that beside another
checkout of this repository. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from common import Record, commit, table, workplace
from PIL import Image

TEXT = ["fit", "text_files", "--data.train_file", "reviews.csv", "--model.name", "base", "--data.max_length", "64"]
TEXT += ["--model.weights", "base", "--model.tokenizer", "base"]
IMPORTS = {
    "import torch": "import torch",
    "import torch, Fabric": "import torch, lightning.fabric",
    "import torch, torchvision": "import torch, torchvision",
    "import torch, transformers": "import torch, transformers",
    "load with transformers": "import transformers as t; t.AutoModelForSequenceClassification.from_pretrained('base')",
}
ONE_STEP = ["--max_steps", "1", "--run.evaluate", "false", "--run.dir", "{out}"]
COMMANDS = {
    "fit": ["fit", "vit_digits", *ONE_STEP],
    "fit text": [*TEXT, *ONE_STEP],
    "predict": ["predict", "{run}", "--image", "{image}"],
    "predict text": ["predict", "{run}-text", "--text", "a good film"],
    "evaluate": ["evaluate", "{run}"],
    "plan": ["plan", "vit_digits", "--gpu", "rtx-3060", "--out", "{out}"],
}
BARS = {  # of which imports a command may cost how many times
    "fit": ("import torch", 1.8),
    "fit text": ("import torch, transformers", 1.5),
    "predict": ("import torch, torchvision", 1.1),
    "predict text": ("import torch, transformers", 1.3),
}
KEYS = ("cpu_seconds", "cpu_seconds_to_end", "first_line_seconds")
TICKS = os.sysconf("SC_CLK_TCK")


def measured(command: list[str], checkout: Path | None, work: Path, until: str = "") -> dict[str, float]:
    """CPU seconds of a process, and of those that it has waited for, until it prints a line that begins with ``until``,
    or to its end; and the seconds to its first line on standard error."""
    environment = {**os.environ, "PYTHONPATH": str(checkout or ""), "CUDA_VISIBLE_DEVICES": ""}
    began, first, seconds = time.monotonic(), None, None
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=work, **pipes) as process:
        said = []
        for line in process.stderr or ():
            first = time.monotonic() - began if first is None else first
            said.append(line)
            if until and seconds is None and line.startswith(until):
                fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
                seconds = sum(map(int, fields[11:15])) / TICKS
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0 or (until and seconds is None):
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(said)}")
    whole = usage.ru_utime + usage.ru_stime  # also of the prediction, which goes on beside the first steps
    found = {"cpu_seconds": whole if seconds is None else seconds, "cpu_seconds_to_end": whole}
    return found | ({} if first is None else {"first_line_seconds": first})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turn with this one")
    asked = parser.parse_args()
    checkouts = {"here": Path(__file__).resolve().parents[1]}
    if asked.beside is not None:
        checkouts["beside"] = asked.beside.resolve()
    record = Record("start", {"rounds": asked.rounds, "beside": asked.beside and commit(asked.beside)})
    record.content["command"] = record.content["command"].replace(str(asked.beside), "CHECKOUT")
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with workplace(None) as work:
        image = work / "digit.png"
        Image.new("L", (8, 8), 100).save(image)
        _text(work)
        runs = {name: work / f"run-{name}" for name in checkouts}
        for name, checkout in checkouts.items():  # which also warms the disk's cache
            for fit, run in ((["fit", "vit_digits"], runs[name]), (TEXT, f"{runs[name]}-text")):
                fit = [*fit, "--max_steps", "1", "--run.dir", str(run)]
                measured([sys.executable, "-m", "trainer", *fit], checkout, work)
        for turn in range(asked.rounds):
            for name, code in IMPORTS.items():
                found[name].append(measured([sys.executable, "-c", code], None, work))
            for command, words in COMMANDS.items():
                for name, checkout in checkouts.items():
                    places = {"out": work / f"{command}-{name}-{turn}", "run": runs[name], "image": image}
                    own = [sys.executable, "-m", "trainer", *(word.format(**places) for word in words)]
                    until = "step 1/" if command.startswith("fit") else ""
                    found[f"{command}, {name}"].append(measured(own, checkout, work, until))
            record.write(seconds=_medians(found), runs=dict(found))
    medians, bars = _medians(found), {}
    for command, (of, most) in BARS.items():
        ratio = medians[f"{command}, here"]["cpu_seconds"] / medians[of]["cpu_seconds"]
        bars[command] = {"of": of, "at_most": most, "ratio": ratio}
    record.write(complete=True, bars=bars)
    rows = [[name, *(f"{row.get(key, float('nan')):.2f}" for key in KEYS)] for name, row in medians.items()]
    print(table(["what", "CPU seconds", "to the end", "first line after s"], rows).replace("nan", "–"))
    for command, bar in bars.items():
        print(f"{command}: {bar['ratio']:.2f} × {bar['of']}, at most {bar['at_most']}")


def _medians(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {name: {key: round(median(row[key] for row in rows), 3) for key in rows[0]} for name, rows in found.items()}


def _text(work: Path) -> None:
    """Write a table of 200 reviews, and a DistilBERT of two small layers with its tokenizer."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    from trainer.models.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 2}
    model = DistilBertForSequenceClassification(DistilBertConfig(**sizes, max_position_embeddings=64))
    for part in (model, tokenizer):
        part.save_pretrained(work / "base")
    rows = (f"a film number {number},{'good' if number % 2 else 'bad'}" for number in range(200))
    (work / "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")


if __name__ == "__main__":
    main()
