"""``trainer sweep --find-lr``: a learning-rate range test, one run whose rate grows until training diverges."""

from __future__ import annotations

import csv
import json
import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from trainer.commands.recipes import create_output_folder
from trainer.errors import RecipeError, RunError, require
from trainer.lab.measured_run import run_trial
from trainer.recipe import Recipe
from trainer.system.files import write_atomic
from trainer.system.redact import redact_words
from trainer.system.text import escaped

STEPS = 100
LOWEST, HIGHEST = 1e-7, 10.0
HALF = 4  # losses on each side in the moving average: an average of only earlier losses would lag behind
DIVERGED = 4.0  # factor between average loss and its minimum at which training has diverged, as in fastai and Lightning


def find_lr(recipe: Recipe, reference: str, flags: Sequence[tuple[str, str | None]], wanted: str | None) -> None:
    """Run the range test of Smith (2015): ``STEPS`` steps whose learning rate grows by a constant factor.

    It suggests the rate at which the smoothed loss falls fastest. ``recipe`` has the ``flags``; ``wanted``: ``--out``.
    """
    own = {"optim.schedule": "range_test", "optim.min_lr": LOWEST, "optim.lr": HIGHEST, "optim.warmup_steps": 0}
    own |= {"optim.warmup_ratio": "null", "optim.scale_lr": "none", "max_steps": STEPS}
    own |= {"epochs": max(recipe.epochs, STEPS), "run.evaluate": False, "run.best": "last", "run.patience": "null"}
    own |= {"run.predict": False, "checkpoint.every": "null", "run.logger": "csv"}
    kept = [(name, text) for name, text in flags if name not in own]
    require(all(name != "run.dir" for name, _ in kept), "--run.dir is set by --find-lr: use --out")
    out = create_output_folder("lr", wanted, reference)
    words = [reference, *as_words([*kept, *((key, str(value)) for key, value in own.items())])]
    print(escaped(f"{STEPS} steps with learning rates from {LOWEST:g} to {HIGHEST:g}, in {out}"), flush=True)
    trial = run_trial(words, out / "run", watch=lambda: "diverged" if curve_of(out / "run").diverged else None)
    curve = curve_of(out / "run")
    ended = f"the run {trial.status}" + (f" ({trial.reason})" if trial.reason else "")
    if len(curve.rates) < 4 * HALF:
        raise RunError(f"too few steps ({len(curve.rates)}) to find a learning rate: {ended}; see {out / 'run.log'}")
    found, least = curve.steepest(), curve.rates[curve.smoothed.index(min(curve.smoothed))]
    if found is None:
        rates = f"from {LOWEST:g} to {curve.rates[-1]:g}"
        raise RecipeError(f"the loss did not fall at any rate {rates}: see {out / 'run.log'}")
    rows = zip(curve.rates, curve.losses, curve.smoothed, strict=True)
    lines = ["lr,loss,smoothed", *(f"{rate!r},{loss!r},{smooth!r}" for rate, loss, smooth in rows)]
    write_atomic(out / "lr.csv", "\n".join(lines) + "\n")
    write_atomic(out / "lr.json", json.dumps({"suggestion": found, "least_loss_at": least, "steps": STEPS}) + "\n")
    from trainer.report.plots import plot_lr_range_test

    plot_lr_range_test(curve.rates, curve.losses, curve.smoothed, found, out / "lr.png")
    # The rate found is for this batch size.
    unscaled = [("optim.scale_lr", "none")] if recipe.optim.scale_lr != "none" else []
    given = [(name, text) for name, text in flags if name not in ("optim.lr", "optim.scale_lr")]
    words = [reference, *as_words([*given, ("optim.lr", f"{found:.1e}"), *unscaled])]
    print(f"the loss falls fastest at {found:.1e} and is lowest at {least:.1e}")
    print(escaped(f"  {shlex.join(['trainer', 'fit', *redact_words(words)])}"))
    print(escaped(f"files: {out}: lr.csv, lr.png, lr.json, run.log"))


class Curve(NamedTuple):
    """Learning rates, losses and their moving average, up to the step at which training ``diverged``, if it did."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    diverged: bool

    def steepest(self) -> float | None:
        """Return the rate with the steepest fall of the smoothed loss over log(rate); ``None`` if it never falls."""
        least = self.smoothed.index(min(self.smoothed))
        slopes = {at: self.smoothed[at + 1] - self.smoothed[at - 1] for at in range(1, least)}  # evenly spaced
        best = min(slopes, key=lambda at: slopes[at], default=None)
        return None if best is None or slopes[best] >= 0 else self.rates[best]


def curve_of(run_dir: Path) -> Curve:
    """Read the learning rates and losses that the run has logged so far."""
    rates, losses, least, diverged = list[float](), list[float](), math.inf, False
    with suppress(OSError), open(run_dir / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            loss = float(row["loss"] or "nan")
            average = mean([*losses[-2 * HALF :], loss])
            least = min(least, average)
            diverged = not math.isfinite(loss) or average > DIVERGED * least
            if diverged:
                break
            rates.append(float(row["lr"]))
            losses.append(loss)
    smoothed = [mean(losses[max(0, at - HALF) : at + HALF + 1]) for at in range(len(losses))]
    return Curve(rates, losses, smoothed, diverged)


def as_words(flags: Sequence[tuple[str, str | None]]) -> list[str]:
    return [f"--{name}" if text is None else f"--{name}={text}" for name, text in flags]
