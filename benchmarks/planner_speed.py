"""How long ``trainer plan`` takes to answer eight questions, in CPU seconds of all its processes, and how many traces.

``python benchmarks/planner_speed.py``: 20 minutes on two cores. With ``--before CHECKOUT`` each round also asks another
checkout of the project, one question after the other. Nothing is downloaded, and no weights exist.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

from common import Record, child_cpu_seconds, commit, table, workplace

HERE = Path(__file__).parents[1]
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA_8B}
QWEN = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "vocab_size": 151_936}
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "qwen3-4b": QWEN
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"tie_word_embeddings": True, "max_position_embeddings": 40_960},
    "qwen3-8b": QWEN | {"intermediate_size": 12_288, "num_hidden_layers": 36, "max_position_embeddings": 40_960},
    "moe-30b": QWEN
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048}
    | {"num_key_value_heads": 4, **EXPERTS},
    "llama-1t": LLAMA
    | {"hidden_size": 65_536, "intermediate_size": 65_536, "num_hidden_layers": 48}
    | {"vocab_size": 32_000},
}
VIT_L = ["benchmarks/recipes/vit_l_16.py", "--memory.micro_batch_size=auto", "--memory.precision=bf16-mixed"]
QUESTIONS: dict[str, list[str]] = {
    "vit_digits": ["vit_digits", "--gpu=a100-80gb"],
    "vit_digits in 1 KB": ["vit_digits", "--gpu=a100-80gb", "--memory.budget=1KB"],
    "Llama of 10^12 weights in 40 GB": ["hf:{llama-1t}", "--gpu=h100-sxm", "--memory.budget=40GB"],
    "30 billion weights of experts in 1.5 GB": ["hf:{moe-30b}", "--gpu=a100-80gb", "--memory.budget=1.5GB"],
    "ViT-L in 4 GB": [*VIT_L, "--gpu=a100-80gb", "--memory.budget=4GB"],
    "ViT-L on 4 ranks of 8 GB": [*VIT_L, "--gpu=a100-80gb", "--devices=4", "--memory.budget=8GB"],
    "Qwen3-4B, 4,096 tokens, on 24 GB": ["hf:{qwen3-4b}", "--tokens=4096", "--gpu=rtx-4090"],
    "lm_qlora on 16 GB": ["lm_qlora", "--model.name={qwen3-8b}", "--model.weights=null", "--gpu=rtx-4080"],
}
"""The arguments of ``trainer plan``."""


def main() -> None:
    """Ask all questions several times, print a table and write the results as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="how often each question is asked (default: 3)")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which an answer is not awaited")
    parser.add_argument("--only", default="", help="only the questions that contain this text")
    given = parser.parse_args()
    checkouts = {"now": HERE, **({"before": given.before.resolve()} if given.before else {})}
    record = Record("planner_speed", {"commits": {name: commit(folder) for name, folder in checkouts.items()}})
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with workplace(None) as folder:
        for name, content in CONFIGURATIONS.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(content))
        folders = {name: str(folder / name) for name in CONFIGURATIONS}
        for _ in range(given.rounds):
            for question, words in QUESTIONS.items():
                for which, checkout in checkouts.items() if given.only in question else ():
                    known = runs.setdefault(question, {}).setdefault(which, [])
                    if all(one["seconds"] is not None for one in known):  # what had no answer is not asked again
                        full = [word.format_map(folders) for word in words] + [f"--out={mkdtemp(dir=folder)}"]
                        known.append(ask(full, checkout, given.limit))
                    record.write(runs=runs, medians=medians(runs))
    record.write(True)
    print(table(list(medians(runs)[0]), [[str(value) for value in row.values()] for row in medians(runs)]))


def ask(words: list[str], checkout: Path, limit: float) -> dict[str, Any]:
    """Run ``trainer plan`` of a checkout once: seconds, CPU seconds, number of traces, and the answer."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before, began = child_cpu_seconds(), time.perf_counter()
    command = [sys.executable, "-m", "trainer", "plan", *words, "--json"]
    pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, cwd=checkout, env=environment, start_new_session=True, **pipes)
    try:
        text, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"seconds": None, "cpu_seconds": None, "traces": None, "answer": f"none within {limit:g} s"}
    used = {"seconds": time.perf_counter() - began, "cpu_seconds": child_cpu_seconds() - before}
    if not text:
        raise SystemExit(f"{' '.join(command)}: {errors.decode()}")
    plan = json.loads(text)
    traces = sum(one["traced"] and one["predicted_reserved_gb"] is not None for one in plan["candidates"])
    chosen = plan["chosen"]["plan"] if plan["chosen"] else plan["explanations"][0]
    return {name: round(value, 1) for name, value in used.items()} | {"traces": traces, "answer": chosen}


def medians(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return a row for each question: the medians of each checkout, and the last answer."""
    rows = []
    for question, of_each in runs.items():
        row: dict[str, Any] = {"question": question}
        for which, found in of_each.items():
            answered = [one for one in found if one["seconds"] is not None]
            for name in ("cpu_seconds", "seconds", "traces"):
                row[f"{name} {which}"] = median(one[name] for one in answered) if answered else "no answer"
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
