"""Draw docs/images/memory.svg: memory of one batch under seven settings, and the loss curves of the same runs.

    python docs/pictures/memory.py measure    # trains seven times, about ten minutes on two cores
    python docs/pictures/memory.py draw       # draws what the first command has measured

``measure`` writes benchmarks/results/picture.json, ``draw`` reads this file only. Run them from the root of the
repository. The images are scikit-learn's digits, so nothing is downloaded. The runs use the CPU: the memory is host
memory for training, which is the peak of the process without the memory of Python and the libraries.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "picture.json"
PICTURE = ROOT / "docs" / "images" / "memory.svg"

SHAPE = {"patch_size": 8, "layers": 6, "heads": 6, "width": 192, "mlp_width": 768, "dropout": 0.0}
FLAGS = [
    *("--max_steps=40", "--batch_size=256", "--data.image_size=32"),
    *(f"--model.{name}={value}" for name, value in SHAPE.items()),
    *("--optim.lr=1.5e-4", "--optim.schedule=constant", "--optim.warmup_steps=0"),
    *("--run.accelerator=cpu", "--run.evaluate=false", "--run.recover=false"),
]
FULL = "--memory.activation_checkpointing=full"
TWO_RANKS = ["--run.devices=2", "--memory.strategy=fsdp"]
SETTINGS = {
    "whole batch at once": ["--memory.micro_batch_size=256"],
    "micro-batches of 64": ["--memory.micro_batch_size=64"],
    "micro-batches of 16": ["--memory.micro_batch_size=16"],
    "activation checkpointing": ["--memory.micro_batch_size=256", FULL],
    "2 ranks, tensor parallel": ["--memory.micro_batch_size=256", "--run.devices=2", "--memory.tensor_parallel=2"],
    "2 ranks, FSDP": ["--memory.micro_batch_size=128", *TWO_RANKS],
    "2 ranks, FSDP, micro-batches of 16": ["--memory.micro_batch_size=16", *TWO_RANKS],
}

# Each color as a light and as a dark page show it: see ``with_dark_mode``.
COLORS = {
    "ink": ("#1f2328", "#e6edf3"),
    "page": ("#ffffff", "#0d1117"),
    "line": ("#d1d9e0", "#3d444d"),
    "dim": ("#59636e", "#9198a1"),
}
CAPTION = """A Vision Transformer of 2.7 million weights, AdamW, float32; the last batch of each epoch is smaller.
Measured on a CPU: host memory for training (not of Python and libraries), the largest of all ranks."""
FONTS = ["DejaVu Sans", "Verdana", "Arial", "Helvetica"]
CURVES = ["#8c959f", "#54aeff", "#0969da", "#bf8700", "#2da44e", "#8250df", "#cf222e"]


def measure() -> None:
    """Train once for each of ``SETTINGS``, each in a fresh process, and write the peaks and the losses."""
    from trainer.lab.measured_run import MALLOC_TRIM_ENV, run_trial
    from trainer.report.summary import versions
    from trainer.system.machine import cores

    environment = {**MALLOC_TRIM_ENV, "OMP_NUM_THREADS": "1"}
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, flags) in enumerate(SETTINGS.items()):
            trial = run_trial(["vit_digits", *FLAGS, *flags], Path(folder) / f"run-{number}", environment=environment)
            if trial.status != "finished":
                raise SystemExit(f"{name}: {trial.status}: {trial.reason}")
            found = trial.to_json()
            kept = ("plan", "steps", "losses", "peak_gb", "memory", "command")
            runs.append({"setting": name} | {key: found[key] for key in kept})
            print(f"{name:<34} {found['peak_gb']:.3f} GB  last loss {found['losses'][-1]:.7f}", flush=True)
    machine = {"device": "CPU", "cores": cores(), "system": f"{platform.system()} {platform.machine()}"}
    about = {"measured": "host memory for training in GB (1e9 bytes), the largest of all ranks", "machine": machine}
    content = {**about, "environment": environment, "versions": versions(), "runs": runs}
    RESULTS.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def draw(results: Path = RESULTS, picture: Path = PICTURE) -> None:
    """Draw the bars and the curves that ``results`` holds into ``picture``, an SVG with text as text."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "trainer", "axes.spines.top": False}
    style |= {"font.size": 12, "font.sans-serif": FONTS}
    light = {name: colors[0] for name, colors in COLORS.items()}
    style |= {f"{key}color": light["line"] for key in ("axes.edge", "xtick.", "ytick.")}
    style |= {f"{key}color": light["ink"] for key in ("text.", "axes.label", "xtick.label", "ytick.label")}
    content = json.loads(results.read_text(encoding="utf-8"))
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 5.2), width_ratios=(1, 1.15))
        figure.set_facecolor(light["page"])
        draw_memory(left, content["runs"])
        draw_losses(right, content["runs"])
        figure.text(0.012, 0.025, CAPTION, color=light["dim"], size=10.5)
        figure.subplots_adjust(left=0.222, right=0.985, top=0.93, bottom=0.2, wspace=0.2)
        figure.savefig(picture, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    picture.write_text(with_dark_mode(picture.read_text(encoding="utf-8")), encoding="utf-8")


def draw_memory(axes: Any, runs: list[dict[str, Any]]) -> None:
    """Draw a bar for each run, labelled with its peak in MB."""
    names = [run["setting"].replace(", micro", ",\nmicro") for run in runs]
    bars = axes.barh(names, [1000 * run["peak_gb"] for run in runs], color=CURVES, height=0.68)
    axes.bar_label(bars, [f"{1000 * run['peak_gb']:,.0f} MB" for run in runs], padding=5)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.spines[["right", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.set_facecolor("none")
    axes.set_title("Peak memory of one batch of 256 images", loc="left", size=13, weight="bold")


def draw_losses(axes: Any, runs: list[dict[str, Any]]) -> None:
    """Draw the curves of all runs over each other, from a thick line to a thin one: they coincide."""
    for number, (run, color) in enumerate(zip(runs, CURVES, strict=True)):
        steps = range(1, 1 + len(run["losses"]))
        axes.plot(steps, run["losses"], color=color, lw=20 - 2.9 * number, solid_capstyle="butt")
    axes.set_facecolor("none")
    axes.spines["right"].set_visible(False)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_title("Loss of the same seven runs", loc="left", size=13, weight="bold")
    text = f"Seven curves, one on top of the other.\nLargest relative difference: {largest_difference(runs):.0e}"
    axes.text(0.98, 0.95, text, transform=axes.transAxes, ha="right", va="top", linespacing=1.5)


def largest_difference(runs: list[dict[str, Any]]) -> float:
    """Return the largest relative difference of a step's loss from that of the first run."""
    first = runs[0]["losses"]
    return max(abs(loss / one - 1) for run in runs for loss, one in zip(run["losses"], first, strict=True))


def with_dark_mode(text: str) -> str:
    """Replace the light colors of an SVG by CSS variables, which have the dark ones where the reader prefers them."""
    for name, (light, _) in COLORS.items():
        text = text.replace(light, f"var(--{name})")
    light, dark = (" ".join(f"--{name}: {pair[mode]};" for name, pair in COLORS.items()) for mode in (0, 1))
    style = f":root {{ {light} }} @media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    return re.sub(r"(<svg [^>]*>)", rf"\1\n <style>{style}</style>", text, count=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "draw"])
    measure() if parser.parse_args().what == "measure" else draw()
