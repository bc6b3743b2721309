"""Fashion-MNIST, 64 samples a step in one micro-batch and in four of 16: are the curves of 20 epochs the same?

Both are `trainer fit mlp_fashion_mnist` on the complete data, in fp32, in processes of their own. Each is resumed where
it was when this is called again with the same --work: --minutes asks the run to stop after so long (SIGTERM).
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Record, sample_data, table

HERE = Path(__file__).parents[1]
PICTURE = HERE / "docs" / "fashion_mnist.svg"
CUTS = {"64 × 1": 64, "16 × 4": 16}


def train(micro_batch_size: int, run_dir: Path, data: Path, epochs: int, seconds: float | None) -> bool:
    """Train, or train on; whether the run has come to its end."""
    command = [sys.executable, "-m", "trainer", "fit", "mlp_fashion_mnist", "--data.root", str(data)]
    command += ["--memory.micro_batch_size", str(micro_batch_size), "--epochs", str(epochs), "--run.dir", str(run_dir)]
    command += ["--run.resume", "auto", "--run.accelerator", "cpu", "--run.predict", "false"]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait()
            return False
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return True


def curve(run_dir: Path) -> dict[str, Any]:
    """What ``metrics.csv`` says: the loss of every step, and the evaluations."""
    losses, evaluations = [], []
    with (run_dir / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            if row["loss"]:
                losses.append(float(row["loss"]))
            if row["test_loss"]:
                evaluations.append((float(row["test_loss"]), float(row["test_accuracy"])))
    return {
        "losses": losses,
        "test_loss": [loss for loss, _ in evaluations],
        "test_accuracy": [a for _, a in evaluations],
    }


def compare(curves: dict[str, dict[str, Any]], epochs: int) -> dict[str, Any]:
    """By epoch: the mean training loss and the evaluation of each, and the largest difference of any step's loss."""
    one, four = curves.values()
    each = len(one["losses"]) // epochs
    apart = [abs(a - b) for a, b in zip(one["losses"], four["losses"], strict=True)]
    parts = [slice(epoch * each, (epoch + 1) * each) for epoch in range(epochs)]
    return {
        "steps": len(one["losses"]),
        "curves": {
            name: {
                "train_loss": [statistics.fmean(found["losses"][part]) for part in parts],
                "test_loss": found["test_loss"],
                "test_accuracy": found["test_accuracy"],
            }
            for name, found in curves.items()
        },
        "largest_difference_of_a_step": [max(apart[part]) for part in parts],
        "largest_difference": max(apart),
        "largest_relative_difference": max(d / a for d, a in zip(apart, one["losses"], strict=True)),
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """The curves over one another, and beside them how far apart they are."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "fashion", "svg.fonttype": "none", "font.size": 9}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    epochs = range(1, len(found["largest_difference_of_a_step"]) + 1)
    styles = ({"linewidth": 3.5, "alpha": 0.4}, {"linewidth": 1.2, "linestyle": "--", "color": "black"})
    for (name, values), style in zip(found["curves"].items(), styles, strict=True):
        left.plot(epochs, values["train_loss"], label=f"{name}: training", **style)
        left.plot(epochs, values["test_loss"], label=f"{name}: test", **style)
    left.set(xlabel="epoch", ylabel="cross entropy", title="64 samples a step, cut in two ways")
    left.legend()
    right.semilogy(epochs, found["largest_difference_of_a_step"], color="black")
    right.set(xlabel="epoch", ylabel="difference", title="largest difference of any step's loss (fp32)")
    for axis in (left, right):
        axis.set_xticks([1, *range(5, len(epochs) + 1, 5)])
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="root of FashionMNIST; by default that of the samples for the tests")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--work", type=Path, help="folder that keeps the runs, to be resumed")
    parser.add_argument("--minutes", type=float, help="stop, to be resumed, after so long")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--out", default="fashion_mnist", help="name of the file of results")
    arguments = parser.parse_args()
    data = (arguments.data or sample_data() / "fashion_mnist").resolve()
    seconds = arguments.minutes and 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="fashion-mnist-") as aside:
        work = arguments.work or Path(aside)
        work.mkdir(parents=True, exist_ok=True)
        runs = {name: work / f"micro-batches-of-{size}" for name, size in CUTS.items()}
        for name, size in CUTS.items():
            if not (runs[name] / "finished").exists():
                if not train(size, runs[name], data, arguments.epochs, seconds):
                    raise SystemExit(f"stopped: run it again with --work {work} to go on")
                (runs[name] / "finished").touch()
        found = compare({name: curve(run_dir) for name, run_dir in runs.items()}, arguments.epochs)
    record = Record(arguments.out, {"epochs": arguments.epochs, "cuts": list(CUTS), "precision": "32-true"})
    record.write(complete=True, **found)
    draw(found, arguments.picture)
    rows = [
        (name, *(f"{values[key][-1]:.6f}" for key in ("train_loss", "test_loss", "test_accuracy")))
        for name, values in found["curves"].items()
    ]
    print(table(("micro-batches", "training loss of the last epoch", "test loss", "test accuracy"), rows))
    print(f"largest difference of any of {found['steps']:,} steps' losses: {found['largest_difference']:.1e}")


if __name__ == "__main__":
    main()
