"""kill -9 during a save, then resuming as the documentation says: does it go on, and with the same losses?

Every contender trains the same network with dropout on the same digits, 18 steps of 20 samples with AdamW, in shuffled
order, and saves every 3 steps, always in the middle of an epoch. Its first start is killed at a random instant within
its second, third or fourth save. What it logs after it was resumed is compared, bit for bit, with an undisturbed run.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import logging
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import lightning
import torch
import transformers
from chaos.forks import adopt_orphans, fork
from common import Record, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

import trainer.api  # noqa: F401  imported once, for all that are forked
from trainer.checkpoint.writer import CheckpointWriter
from trainer.data import Digits
from trainer.models import MLP

Train = Callable[[Path, bool], None]
"""Trains in a folder, from the start or resumed."""

STEPS, EVERY, BATCH_SIZE, LR = 18, 3, 20, 1e-3
RECIPE = Path(__file__).parent / "recipes" / "mlp_to_kill.py"


class Diary:
    """What a start of a run writes down for the parent: each line at once, for it may be killed.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"diary-{len(list(folder.glob('diary-*')))}.jsonl"
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **entry: Any) -> None:
        """Add a line."""
        os.write(self.file, f"{json.dumps(entry)}\n".encode())

    def around(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """``save``, with a line before and after it."""

        def watched(*args: Any, **options: Any) -> Any:
            self.write(save="begins", at=time.monotonic())
            result = save(*args, **options)
            self.write(save="ends", at=time.monotonic())
            return result

        return watched


def digits() -> TensorDataset:
    """The training images and their classes."""
    data = Digits()
    data.prepare()
    batch = data.train.__getitems__(range(len(data.train)))
    return TensorDataset(batch["pixel_values"], batch["labels"])


def network() -> nn.Module:
    """The same network, with the same weights, for all but ours, which seeds its own."""
    torch.manual_seed(0)
    return MLP(hidden=[2048, 2048], dropout=0.1, image_size=8, channels=1, num_classes=10).build()


def bare(folder: Path, resume: bool) -> None:
    """torch alone: one file, overwritten by torch.save, as in PyTorch's tutorial on torchrun and snapshots."""
    diary, data, model = Diary(folder), digits(), network()
    optimizer, path, done = AdamW(model.parameters(), LR), folder / "snapshot.pt", 0
    if resume and path.exists():
        found = torch.load(path, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        done = found["step"]
    save = diary.around(torch.save)
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(0))
    for step, (pixels, labels) in enumerate(loader, 1):
        if step > STEPS:
            return
        if step <= done:
            continue
        loss = cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        diary.write(step=step, loss=loss.item())
        if step % EVERY == 0:
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)


class Module(lightning.LightningModule):
    """For Lightning's Trainer."""

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.model, self.diary = network(), diary

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.diary.write(step=self.global_step + 1, loss=loss.item())
        return loss

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), LR)


def lightning_trainer(folder: Path, resume: bool) -> None:
    """Lightning's Trainer, resumed by ``ckpt_path="last"``."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    diary = Diary(folder)
    lightning.seed_everything(0, workers=True, verbose=False)
    keep = ModelCheckpoint(folder / "lightning", every_n_train_steps=EVERY, save_last=True, save_top_k=1)
    runner = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        callbacks=[keep],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    runner.save_checkpoint = diary.around(runner.save_checkpoint)
    runner.fit(Module(diary), DataLoader(digits(), BATCH_SIZE, shuffle=True), ckpt_path="last" if resume else None)


class ForTransformers(nn.Module):
    """What transformers' Trainer wants of a model."""

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.model, self.diary, self.runner = network(), diary, None

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = cross_entropy(self.model(pixel_values), labels)
        self.diary.write(step=self.runner.state.global_step + 1, loss=loss.item())
        return {"loss": loss}


def transformers_trainer(folder: Path, resume: bool) -> None:
    """transformers' Trainer, resumed by ``resume_from_checkpoint=True``."""
    diary = Diary(folder)
    model = ForTransformers(diary)
    arguments = transformers.TrainingArguments(
        str(folder / "transformers"),
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=STEPS,
        save_steps=EVERY,
        save_total_limit=2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    samples = [{"pixel_values": pixels, "labels": label} for pixels, label in digits()]
    runner = transformers.Trainer(model, arguments, train_dataset=samples)
    model.runner = runner
    runner._save_checkpoint = diary.around(runner._save_checkpoint)
    runner.train(resume_from_checkpoint=resume)


def ours(folder: Path, resume: bool) -> None:
    """``trainer fit``, resumed by ``--run.resume auto``."""
    from trainer.cli import run
    from trainer.engine.step import StepResult
    from trainer.run.listeners import LoggingListener

    diary = Diary(folder)
    CheckpointWriter.write = diary.around(CheckpointWriter.write)
    log = LoggingListener.on_step

    def logged(self: Any, counters: Any, result: StepResult) -> None:
        diary.write(step=counters.step, loss=result.loss)
        log(self, counters, result)

    LoggingListener.on_step = logged
    flags = ["--run.resume", "auto"] if resume else []
    if run(["fit", str(RECIPE), "--run.dir", str(folder / "run"), *flags]):
        raise RuntimeError("trainer fit failed")


CONTENDERS: dict[str, tuple[str, Train]] = {
    "bare": ("torch.save over one file", bare),
    "lightning": ("Lightning Trainer", lightning_trainer),
    "transformers": ("transformers Trainer", transformers_trainer),
    "ours": ("ours: trainer fit", ours),
}


def start(train: Train, folder: Path, resume: bool) -> int:
    """Begin a start of a run in a process of its own."""

    def work() -> int:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        train(folder, resume)
        return 0

    return fork(work, folder / "output.txt")


def diary_of(folder: Path, number: int) -> list[dict[str, Any]]:
    """What a start has written down so far."""
    path = folder / f"diary-{number}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder: Path, number: int) -> dict[int, float]:
    """By step."""
    return {entry["step"]: entry["loss"] for entry in diary_of(folder, number) if "step" in entry}


def undisturbed(train: Train, folder: Path) -> tuple[dict[int, float], float]:
    """The losses, and the seconds that a save takes."""
    folder.mkdir(parents=True)
    pid = start(train, folder, resume=False)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError((folder / "output.txt").read_text()[-3000:])
    saves = [entry["at"] for entry in diary_of(folder, 0) if "save" in entry]
    seconds = [end - begin for begin, end in zip(saves[::2], saves[1::2], strict=True)]
    return losses(folder, 0), sorted(seconds)[len(seconds) // 2]


def trial(train: Train, folder: Path, reference: dict[int, float], seconds: float, draw: Random) -> str:
    """Kill it in a save, resume it, and say in a word what came of that."""
    folder.mkdir(parents=True)
    pid, save = start(train, folder, resume=False), draw.randint(2, 4)
    files = 2 if train is lightning_trainer else 1  # a checkpoint of that step, and last.ckpt
    begun = files * (save - 1) + draw.randint(1, files)
    while sum(entry.get("save") == "begins" for entry in diary_of(folder, 0)) < begun:
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise RuntimeError((folder / "output.txt").read_text()[-3000:])
        time.sleep(0.001)
    time.sleep(draw.uniform(0, seconds))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if os.waitpid(start(train, folder, resume=True), 0)[1]:
        return "failed to resume"
    resumed = losses(folder, 1)
    if min(resumed) > save * EVERY + 1 or max(resumed) != STEPS:
        return "left out steps"
    if min(resumed) == 1:
        return "began anew"
    return "same losses" if all(loss == reference[step] for step, loss in resumed.items()) else "other losses"


def measure(name: str, trials: int, folder: Path) -> dict[str, Any]:
    """All trials of a contender."""
    label, train = CONTENDERS[name]
    reference, seconds = undisturbed(train, folder / name / "undisturbed")
    again, _ = undisturbed(train, folder / name / "again")
    found: dict[str, int] = {}
    errors: list[str] = []
    for number in range(trials):
        place = folder / name / str(number)
        what = trial(train, place, reference, seconds, Random(number))
        found[what] = found.get(what, 0) + 1
        if what == "failed to resume":
            errors.append((place / "output.txt").read_text().strip().splitlines()[-1])
        shutil.rmtree(place)
    return {
        "label": label,
        "repeats_itself": reference == again,
        "save_seconds": round(seconds, 4),
        "trials": trials,
        "outcomes": found,
        "errors": sorted(set(errors)),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    settings = parser.parse_args()
    adopt_orphans()
    record = Record("chaos_peers", vars(settings))
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="chaos-peers-") as folder:
        for name in settings.only.split(","):
            rows[name] = measure(name, settings.trials, Path(folder))
            record.write(contenders=rows)
    record.write(complete=True)
    kinds = ("same losses", "other losses", "left out steps", "began anew", "failed to resume")
    lines = [[row["label"], *(str(row["outcomes"].get(kind, 0)) for kind in kinds)] for row in rows.values()]
    print(table(["killed in a save, resumed", *kinds], lines))


if __name__ == "__main__":
    main()
