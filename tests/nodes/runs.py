"""Runs over several machines: a tiny recipe under torchrun on each, and what they leave."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from helpers.started import FOREIGN, own_recipe
from nodes.hosts import Host, Process

SETTINGS = """
    model=Disturbed("custom", patch_size=4, layers=2, heads=2, width=16, mlp_width=32, dropout=0.1),
    optim=Optim("sgd", lr=0.1, momentum=0.9, clip_norm=1.0),
    batch_size=48,
    max_steps=60,
    epochs=10,
    memory=Memory(micro_batch_size=12, precision="64-true"),  # in which rounding stays small
    checkpoint=Checkpoint(every=5, asynchronous=False),
"""
PORT = 29500
LAUNCH = Path(__file__).parents[2] / "launch" / "nodes.sh"


def environment(**more: str) -> dict[str, str]:
    """That of a person who starts a run by hand."""
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith((*FOREIGN, "TORCH_", "GLOO_", "RDZV_"))
    }
    python = str(Path(sys.executable).parent)
    return clean | {"OMP_NUM_THREADS": "1", "PATH": f"{python}:{clean.get('PATH', '')}"} | more


def torchrun(
    host: Host, head: Host, count: str, folder: Path, *flags: str, ranks: int = 1, own: tuple = (), head_as: str = ""
) -> Process:
    """Start ``torchrun … -m trainer fit`` on ``host``, as it is typed, with flags of its ``own``."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", count, "--nproc-per-node", str(ranks)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head_as or head.name}:{PORT}", *own]
    words += ["-m", "trainer", "fit", str(recipe_in(folder)), "--run.dir", str(folder / "run"), *flags]
    return host.start(words, folder / f"{host.name}.txt", environment(), folder)


def nodes(
    host: Host, head: Host, count: str, folder: Path, *flags: str, private: Path | None = None, **more: str
) -> Process:
    """Start ``launch/nodes.sh`` on ``host``, one rank, with variables as given."""
    words = [str(LAUNCH), head.name, count, "1", str(recipe_in(folder)), "--run.dir", str(folder / "run"), *flags]
    variables = environment(**{"LAST_CALL": "5"} | more)
    return host.start(words, folder / f"{host.name}.txt", variables, folder, private)


def recipe_in(folder: Path) -> Path:
    """The recipe, as a file in ``folder``."""
    path = folder / "own.py"
    return path if path.exists() else own_recipe(folder, SETTINGS)


def newest_step(run_dir: Path) -> int:
    """Of the newest checkpoint; 0 when there is none."""
    found = sorted(path.name for path in (run_dir / "checkpoints").glob("step-" + 8 * "?"))
    return int(found[-1].removeprefix("step-")) if found else 0


def samples(folder: Path) -> list[list[set[int]]]:
    """What TRAINER_TEST_SAMPLES has gathered there: of every process, its micro-batches in order."""
    starts = [[set(json.loads(line)) for line in path.read_text().splitlines()] for path in sorted(folder.iterdir())]
    return [start for start in starts if start]


def assert_same_samples(starts: list[list[set[int]]], reference: list[set[int]]) -> None:
    """Every start took a piece of the ``reference``, a batch a step, and together they took all of it.

    Args:
        starts: micro-batches of every process that took part.
        reference: the batches of the undisturbed run.
    """
    taken = [set[int]() for _ in reference]
    for start in starts:
        step = next(number for number, batch in enumerate(reference) if start[0] <= batch)
        for micro_batch in start:
            if not micro_batch <= reference[step]:
                step += 1
            assert micro_batch <= reference[step], f"other samples than those of step {step + 1}"
            taken[step] |= micro_batch
    assert taken == reference
