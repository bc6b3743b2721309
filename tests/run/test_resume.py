"""A resumed run is the undisturbed one: on the same ranks bit for bit, on others to rounding."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.resumed import OPTIM, losses, recipe, resume, saved
from torch import nn

from trainer import Checkpoint, Optim, RecipeError
from trainer.data import Digits
from trainer.errors import RunError
from trainer.fit import fit
from trainer.models import MLP
from trainer.values import Loss

pytestmark = pytest.mark.usefixtures("no_pictures")


class Normed(MLP):
    """With a layer whose running statistics are part of the state."""

    def build(self) -> nn.Module:
        module = super().build()
        assert isinstance(module, nn.Sequential)
        return nn.Sequential(*module[:-1], nn.BatchNorm1d(module[-1].in_features), module[-1])


class Drawing(MLP):
    """Draws from generators that the engine does not seed, and leaves a parameter without a gradient."""

    def build(self) -> nn.Module:
        module = super().build()
        module.unused = nn.Parameter(torch.ones(3))
        return module

    def losses(self, module: nn.Module, batch: Any) -> Any:
        scale = 1 + 0.1 * (random.random() + np.random.rand())
        for loss in super().losses(module, batch):
            yield Loss(loss.total * scale, loss.weight, loss.name, loss.logits, loss.targets)


class Noisy:
    """Samples that draw from a generator that nobody seeds for them, as transforms of one's own may."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        time.sleep(0.001)  # the fingerprint takes longer than a step
        return sample | {"pixel_values": sample["pixel_values"] + random.random()}


class NoisyDigits(Digits):
    """Digits in a dataset without a fingerprint of its own."""

    def prepare(self, tokenizer: Any = None) -> None:
        super().prepare(tokenizer)
        self.train = Noisy(self.train)


class ValidatedDigits(Digits):
    """With a validation set, and nothing to test on."""

    def prepare(self, tokenizer: Any = None) -> None:
        super().prepare(tokenizer)
        self.val, self.test = self.test, None


class Rotary(MLP):
    """With buffers of types that few models have."""

    def build(self) -> nn.Module:
        module = super().build()
        module.register_buffer("frequencies", torch.polar(torch.ones(3), torch.arange(3.0)))
        module.register_buffer("places", torch.ones(3, dtype=torch.uint16))
        return module


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optim": Optim("sgd", lr=0.1)},
    "momentum": {"optim": Optim("sgd", lr=0.1, momentum=0.9)},
    "adafactor": {"optim": Optim("adafactor", lr=1e-2)},
    "lion": {"optim": Optim("lion", lr=1e-3)},
    "bf16-mixed": {"memory": {"precision": "bf16-mixed"}},
    "bf16-true": {"memory": {"precision": "bf16-true"}},
    "16-mixed": {"memory": {"precision": "16-mixed"}},
    "masters on the host": {"memory": {"precision": "bf16-mixed", "cpu_offload": "optimizer"}},
    "state of 8 bits": {"memory": {"optimizer_state_bits": 8}, "model": MLP([256])},
    "state of 4 bits": {"memory": {"optimizer_state_bits": 4}, "model": MLP([256])},
    "stochastic rounding": {"memory": {"precision": "bf16-true", "stochastic_rounding": True}},
    "optimizer in backward": {
        "memory": {"optimizer_in_backward": True, "micro_batch_size": 24},
        "optim": dataclasses.replace(OPTIM, clip_norm=None),
    },
    "checkpointing": {"memory": {"activation_checkpointing": "full"}},
    "largest micro-batch": {"memory": {"micro_batch_size": "auto"}},
    "schedule of batches": {"memory": {"micro_batch_size": 12}, "batch_size": None, "accumulate": {0: 2, 1: 1}},
    "batchnorm": {"model": Normed([16], dropout=0.5)},
    "other generators": {"model": Drawing([16])},
    "other generators, rehearsed": {"model": Drawing([16]), "memory": {"micro_batch_size": "auto"}},
    "data that draw": {"data": NoisyDigits(test_fraction=0.97)},
    "buffers of other types": {"model": Rotary([16])},
    "synchronous": {"checkpoint": Checkpoint(every=2, keep_last=9, asynchronous=False)},
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(case, tmp_path):
    settings = CASES[case]
    summary = fit(recipe(tmp_path / "whole", **settings))
    resume(tmp_path / "whole", tmp_path / "rest", 2, **settings)
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")
    assert saved(tmp_path / "rest", summary.steps) == saved(tmp_path / "whole", summary.steps)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "rest/model" / name).read_bytes() == (tmp_path / "whole/model" / name).read_bytes()


WORLDS = {
    "single": (1, {"strategy": "single"}),
    "ddp×2": (2, {"strategy": "ddp"}),
    "fsdp×2": (2, {"strategy": "fsdp"}),
    "fsdp×2 + offload": (2, {"strategy": "fsdp", "cpu_offload": "optimizer"}),
}
TARGETS = WORLDS | {"fsdp×4": (4, {"strategy": "fsdp"})}


def in_world(ranks, world, function, *args: Any, **changes: Any) -> None:
    """Call ``function`` on the ranks of a world, with its memory settings."""
    size, memory = TARGETS[world]
    # 48 samples in batches of 24: the cut, and with it dropout, is the same on 1, 2 and 4 ranks.
    changes |= {"memory": {"micro_batch_size": 3} | memory, "data": Digits(test_fraction=0.9732), "epochs": 3}
    if size == 1:
        function(*args, **changes)
    else:
        ranks(size).run(_call, function, args, changes)


def _call(function, args, changes) -> None:
    function(*args, **changes)


def train(run_dir: Path, **changes: Any) -> None:
    fit(recipe(run_dir, **changes))


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return tmp_path_factory.mktemp("originals")


def original(ranks, originals: Path, world: str) -> Path:
    """The undisturbed run in ``world``; made once."""
    run_dir = originals / world
    if not run_dir.exists():
        in_world(ranks, world, train, run_dir)
    return run_dir


QUICK = {("single", "fsdp×2"), ("ddp×2", "single"), ("fsdp×2", "fsdp×2 + offload"), ("fsdp×2 + offload", "ddp×2")}
PAIRS = [
    pytest.param(world, target, marks=() if world == target or (world, target) in QUICK else pytest.mark.slow)
    for world in WORLDS
    for target in TARGETS
]


@pytest.mark.parametrize(("world", "target"), PAIRS)
def test_any_world_resumes_what_any_other_saved(world, target, ranks, originals, tmp_path):
    whole = original(ranks, originals, world)
    in_world(ranks, target, resume, whole, tmp_path / "rest", 2, run={"allow_change": ["memory"]})
    assert losses(tmp_path / "rest") == pytest.approx(losses(whole), rel=1e-6)
    if world == target:
        assert losses(tmp_path / "rest") == losses(whole)
        assert saved(tmp_path / "rest", 6) == saved(whole, 6)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with checkpoints after steps 2, 4 and 6."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    fit(recipe(run_dir))
    return run_dir


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_auto_takes_the_newest_and_a_finished_run_has_nothing_left_to_do(copied, finished):
    summary = fit(recipe(copied, run={"resume": "auto"}))
    assert summary.steps == 6
    assert losses(copied) == losses(finished)
    for name in ("model.safetensors", "config.json"):
        assert (copied / "model" / name).read_bytes() == (finished / "model" / name).read_bytes()


@pytest.mark.parametrize(("data", "split"), [(Digits, "test"), (ValidatedDigits, "val")])
def test_a_run_that_is_resumed_at_its_end_is_evaluated(data, split, tmp_path):
    settings: dict[str, Any] = {"data": data(test_fraction=0.97)}
    first = fit(recipe(tmp_path / "r", run={"evaluate": True}, **settings))
    again = fit(recipe(tmp_path / "r", run={"evaluate": True, "resume": "auto"}, **settings))
    assert again.metrics == first.metrics
    assert 0 < again.metrics[split]["accuracy"] < 1


def test_a_finished_run_trains_on_when_more_epochs_are_allowed(copied, tmp_path):
    fit(recipe(tmp_path / "three", epochs=3, optim=dataclasses.replace(OPTIM, schedule="constant")))
    fit(recipe(copied, epochs=3, run={"resume": "auto", "allow_change": ["epochs"]}))
    assert len(losses(copied)) == len(losses(tmp_path / "three")) == 9


def rates(run_dir: Path) -> list[float]:
    with open(run_dir / "metrics.csv", newline="") as file:
        return [float(row["lr"]) for row in csv.DictReader(file) if row["lr"]]


def test_the_schedule_of_a_run_that_trains_on_is_that_of_the_longer_run(copied, tmp_path):
    fit(recipe(tmp_path / "three", epochs=3))
    fit(recipe(copied, epochs=3, run={"resume": "auto", "allow_change": ["epochs"]}))
    assert rates(copied)[6:] == rates(tmp_path / "three")[6:]
    assert min(rates(copied)[6:]) > 0


def test_a_corrupt_newest_checkpoint_is_passed_over_and_said(copied, finished, capsys):
    damage(copied / "checkpoints/step-00000006/rank-00000.safetensors")
    fit(recipe(copied, run={"resume": "auto"}))  # which shows no progress
    output = capsys.readouterr().err
    assert "step-00000006/rank-00000.safetensors is corrupt" in output
    assert "resuming from step-00000004 instead" in output
    assert (copied / "checkpoints/step-00000006.corrupt").is_dir()
    assert saved(copied, 6) == saved(finished, 6)


def test_without_a_valid_checkpoint_the_run_refuses_by_file_name(copied):
    for path in (copied / "checkpoints").iterdir():
        damage(path / "state.json")
    with pytest.raises(RecipeError, match=r"step-00000006/state\.json is corrupt.*and 2 older ones are not valid"):
        fit(recipe(copied, run={"resume": "auto"}))
    assert len(list((copied / "checkpoints").iterdir())) == 3


def test_a_named_checkpoint_that_is_corrupt_is_refused(copied):
    path = copied / "checkpoints/step-00000004"
    damage(path / "metrics.csv")
    with pytest.raises(RecipeError, match=r"step-00000004/metrics\.csv is corrupt"):
        fit(recipe(copied, run={"resume": str(path)}))


def test_a_corrupt_checkpoint_is_called_so_however_the_run_directory_is_named(copied, monkeypatch):
    damage(copied / "checkpoints/step-00000006/state.json")
    monkeypatch.chdir(copied.parent)
    fit(recipe(copied, run={"resume": copied.name}))
    assert (copied / "checkpoints/step-00000006.corrupt").is_dir()


def test_a_refused_resume_leaves_all_checkpoints_where_they_are(copied):
    with pytest.raises(RecipeError, match="batch_size: 24 in the checkpoint, 12 now"):
        fit(recipe(copied, batch_size=12, run={"resume": str(copied / "checkpoints/step-00000002")}))
    names = sorted(path.name for path in (copied / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000006"]


def test_links_lead_to_the_run_and_to_its_checkpoints(copied, finished):
    link, latest = copied.parent / "link", copied / "latest"
    link.symlink_to(copied)
    latest.symlink_to("checkpoints/step-00000004")
    fit(recipe(copied, run={"resume": str(link / "latest")}))
    assert (copied / "checkpoints/step-00000006.abandoned").is_dir()
    assert saved(copied, 6) == saved(finished, 6)


def test_checkpoints_after_the_one_that_is_named_are_set_aside(copied, finished):
    fit(recipe(copied, run={"resume": str(copied / "checkpoints/step-00000002")}))
    names = sorted(path.name for path in (copied / "checkpoints").iterdir())
    assert names == [
        "step-00000002",
        "step-00000004",
        "step-00000004.abandoned",
        "step-00000006",
        "step-00000006.abandoned",
    ]
    assert saved(copied, 6) == saved(finished, 6)


def test_tensorboard_shows_a_step_that_is_taken_again_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(recipe(tmp_path, run={"logger": ["tensorboard"]}))
    fit(recipe(tmp_path, run={"logger": ["tensorboard"], "resume": str(tmp_path / "checkpoints/step-00000002")}))
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 2
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in shown.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def test_auto_does_not_train_a_finished_run_again(copied):
    shutil.rmtree(copied / "checkpoints")
    history = (copied / "metrics.csv").read_bytes()
    with pytest.raises(RecipeError, match="holds a run that has finished, and no checkpoint to go on from"):
        fit(recipe(copied, run={"resume": "auto"}))
    assert (copied / "metrics.csv").read_bytes() == history


def test_a_checkpoint_of_a_later_version_is_no_corrupt_one(copied):
    manifest = copied / "checkpoints/step-00000006/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(RecipeError, match=r"has format 99.*resume with the version that has written it"):
        fit(recipe(copied, run={"resume": "auto"}))
    assert manifest.exists()


def fail_to_write(run_dir: Path) -> str:
    """The second rank's disk breaks in the second checkpoint; what each rank says."""
    from trainer.checkpoint.writer import Writer

    whole = Writer._write_own

    def broken(self, staging, snapshot):
        if self.rank == 1 and snapshot.step == 4:
            raise OSError(5, "Input/output error", str(staging))
        whole(self, staging, snapshot)

    Writer._write_own = broken
    try:
        fit(recipe(run_dir))
    except RunError as error:
        return str(error)
    finally:
        Writer._write_own = whole
    return "no error"


def test_a_rank_that_cannot_write_ends_all_and_the_older_checkpoint_stays(ranks, tmp_path):
    said = ranks(2).run(fail_to_write, tmp_path / "r")
    assert "rank 1: the checkpoint of step 4 could not be written: Input/output error" in said[0]
    assert said[1].startswith("the checkpoint of step 4 could not be written: Input/output error")
    assert [path.name for path in (tmp_path / "r/checkpoints").iterdir()] == ["step-00000002"]


def test_auto_without_a_checkpoint_starts_anew(tmp_path, finished):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.csv").write_text("step\n1\n")
    fit(recipe(tmp_path / "run", run={"resume": "auto"}))
    assert losses(tmp_path / "run") == losses(finished)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"resume": "auto", "dir": None}, "run.resume=auto needs run.dir"),
        ({"resume": "nowhere", "dir": "new"}, "run.resume=nowhere: there is no checkpoint in nowhere"),
        ({}, "already holds a run: go on with it by --run.resume auto"),
    ],
)
def test_what_cannot_be_resumed_is_refused(copied, run, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=message):
        fit(recipe(copied, run=run))


def test_the_best_checkpoints_are_kept(tmp_path):
    wishes = Checkpoint(every=None, keep_last=1, keep_best=2)
    fit(recipe(tmp_path / "r", eval_every=1, epochs=3, checkpoint=wishes, run={"evaluate": True}))
    found = [json.loads(path.read_text()) for path in (tmp_path / "r/checkpoints").glob("*/manifest.json")]
    with open(tmp_path / "r/metrics.csv", newline="") as file:
        accuracies = [float(row["test_accuracy"]) for row in csv.DictReader(file) if row["test_accuracy"]]
    best = sorted(accuracies)[-2:]
    kept = sorted(manifest["figures"]["accuracy"] for manifest in found)
    assert kept[-2:] == best
    assert len(found) <= 3
    assert max(manifest["step"] for manifest in found) == 9


class Failing(MLP):
    """Cannot take its fourth step."""

    micro_batches = 0

    def losses(self, module: nn.Module, batch: Any) -> Any:
        self.micro_batches += 1
        if self.micro_batches == 19:
            raise ZeroDivisionError
        yield from super().losses(module, batch)


def test_a_checkpoint_in_the_making_is_completed_when_the_run_fails(tmp_path, monkeypatch):
    from trainer.checkpoint.writer import Writer

    write = Writer.write
    monkeypatch.setattr(Writer, "write", lambda writer, snapshot: (time.sleep(1.0), write(writer, snapshot)))
    with pytest.raises(ZeroDivisionError):
        fit(recipe(tmp_path / "r", model=Failing([16]), checkpoint=Checkpoint(every=3)))
    assert (tmp_path / "r/checkpoints/step-00000003/manifest.json").is_file()


def test_nothing_is_saved_when_nothing_is_due(tmp_path):
    fit(recipe(tmp_path / "r", checkpoint=Checkpoint(every="1h")))
    assert not (tmp_path / "r/checkpoints").exists()


def test_a_checkpoint_is_due_by_the_clock(tmp_path):
    fit(recipe(tmp_path / "r", checkpoint=Checkpoint(every="0.000001s", keep_last=9)))
    assert len(list((tmp_path / "r/checkpoints").iterdir())) == 6


def test_no_secret_of_the_environment_is_in_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_veryverysecretvalue")
    fit(recipe(tmp_path / "r", max_steps=2))
    for folder, _, names in os.walk(tmp_path / "r"):
        for name in names:
            assert b"hf_veryverysecretvalue" not in Path(folder, name).read_bytes()
