"""Memory against the length of a text: ``CausalLM`` with tiles of tokens, beside transformers, on a CPU.

``python benchmarks/long_texts.py``: the increase of resident memory in a training step with one text, after a step with
a short one. Each measurement is a process of its own. Both checkpoint every block; transformers holds all logits.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch
import transformers as hf
from common import RESULTS, Record, environment_here, resolve, table
from fake_ranks import build_stepper

from trainer.launching.start import launch
from trainer.launching.world import World
from trainer.memory.plan import decide_plan
from trainer.planner.predict import prepare_recipe
from trainer.planner.traced_run import draw_samples
from trainer.system.machine import HostMemory

ROUNDS, LENGTHS, SHORT = 2, (512, 2048, 8192, 16384, 32768), 16
SIZES: Any = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"head_dim": 32, "intermediate_size": 384, "vocab_size": 4096, "max_position_embeddings": LENGTHS[-1]}
OURS = "--model.name qwen3 --model.padding_free true --model.tile_tokens 2048 --run.accelerator cpu"
OURS += " --memory.precision 32-true --memory.strategy single --memory.activation_checkpointing full"


def our_step(tokens: int) -> Any:
    """A function that takes a step with the first tokens of a text of ``tokens``."""
    recipe = [str(RESULTS.parent / "recipes" / "language_model.py"), *OURS.split(), "--data.tokens", str(tokens)]
    resolved = prepare_recipe(resolve([*recipe, "--model.config", json.dumps(SIZES)]))
    plan = decide_plan(resolved, 1)
    stepper, _ = build_stepper(launch(plan, World("python", "cpu", devices=1, nodes=1)), resolved, plan)
    window = draw_samples(resolved, plan).first
    (micro,) = window
    whole = micro.batch

    def step(length: int) -> None:
        micro.batch = {name: value[:, :length] for name, value in whole.items()}
        micro.packed, window.weights = None, {"loss": float(length - 1)}
        stepper.step(window)

    return step


def their_step(tokens: int) -> Any:
    """The same with transformers."""
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, use_cache=False)).train()
    model.gradient_checkpointing_enable()
    optimizer, ids = torch.optim.AdamW(model.parameters(), 1e-5), torch.randint(SIZES["vocab_size"], (1, tokens))

    def step(length: int) -> None:
        model(input_ids=ids[:, :length], labels=ids[:, :length]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def increase(system: str, tokens: int) -> float:
    """The increase of resident memory in MB."""
    step, memory = (our_step if system == "trainer" else their_step)(tokens), HostMemory()
    step(SHORT)
    memory.reset_peak()
    before = memory.read().resident
    step(tokens)
    return (memory.read().peak - before) / 1e6


def main() -> None:
    record = Record("long_texts", {"rounds": ROUNDS, "config": SIZES, "flags": OURS})
    found: dict[str, dict[int, list[float]]] = {name: {n: [] for n in LENGTHS} for name in ("transformers", "trainer")}
    for tokens, system in ROUNDS * [(tokens, system) for tokens in LENGTHS for system in found]:
        command = [sys.executable, str(Path(__file__).resolve()), system, str(tokens)]
        environment = environment_here() | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        found[system][tokens].append(float(done.stdout.splitlines()[-1]))
        record.write(increase_mb=found)
    medians = {system: [median(rows[tokens]) for tokens in LENGTHS] for system, rows in found.items()}
    slopes = {system: 1000 * linear_regression(LENGTHS, values).slope for system, values in medians.items()}
    record.write(complete=True, kb_per_token=slopes)
    rows = [[f"{n:,}", *(f"{values[at]:,.0f} MB" for values in medians.values())] for at, n in enumerate(LENGTHS)]
    print(table(["tokens", *medians], [*rows, ["kB per token", *(f"{slope:.1f}" for slope in slopes.values())]]))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(increase(sys.argv[1], int(sys.argv[2])))
    else:
        main()
