"""A resumed run is the undisturbed one: on the same ranks bit for bit, on others to rounding."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import random
import shutil
import sys
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.resumed import OPTIM, losses, recipe, resume, saved
from helpers.rounding import ROUNDING
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from trainer import Checkpoint, Listener, Optim, RecipeError
from trainer.api import fit
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.writer import CheckpointWriter
from trainer.data import Digits
from trainer.errors import RunError
from trainer.models import MLP
from trainer.report.summary import versions
from trainer.values import Loss

pytestmark = pytest.mark.usefixtures("no_pictures")


class Normed(MLP):
    """With a layer whose running statistics are part of the state, and buffers of types that few models have."""

    def build(self) -> nn.Module:
        module = super().build()
        assert isinstance(module, nn.Sequential)
        module = nn.Sequential(*module[:-1], nn.BatchNorm1d(module[-1].in_features), module[-1])
        module.register_buffer("frequencies", torch.polar(torch.ones(3), torch.arange(3.0)))
        module.register_buffer("places", torch.ones(3, dtype=torch.uint16))
        return module


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


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "momentum": {"optim": Optim("sgd", lr=0.1, momentum=0.9)},
    "muon": {"optim": dataclasses.replace(OPTIM, name="muon")},
    "adafactor": {"optim": Optim("adafactor", lr=1e-2)},
    "16-mixed": {"memory": {"precision": "16-mixed"}},
    "masters on the host": {"memory": {"precision": "bf16-mixed", "cpu_offload": "optimizer"}},
    "state of 8 bits": {"memory": {"optimizer_state_bits": 8}, "model": MLP([256])},
    "state of 4 bits": {"memory": {"optimizer_state_bits": 4}, "model": MLP([256])},
    "stochastic rounding": {"memory": {"precision": "bf16-true", "stochastic_rounding": True}},
    "optimizer in backward": {
        "memory": {"optimizer_in_backward": True, "micro_batch_size": 24},
        "optim": dataclasses.replace(OPTIM, clip_norm=None),
    },
    "schedule of batches": {"memory": {"micro_batch_size": 12}, "batch_size": None, "accumulate": {0: 2, 1: 1}},
    "buffers": {"model": Normed([16], dropout=0.5), "memory": {"correct_batchnorm": True}},
    "other generators, rehearsed": {"model": Drawing([16]), "memory": {"micro_batch_size": "auto"}},
    "data that draw": {"data": NoisyDigits(test_fraction=0.97)},
    "synchronous": {"checkpoint": Checkpoint(every=2, keep_last=9, asynchronous=False)},
}


@pytest.mark.first(1)
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(case, tmp_path):
    settings = CASES[case]
    summary = fit(recipe(tmp_path / "whole", **settings))
    resume(tmp_path / "whole", tmp_path / "rest", 2, **settings)
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")
    assert saved(tmp_path / "rest", summary.steps) == saved(tmp_path / "whole", summary.steps)
    require_same_model(tmp_path / "rest", tmp_path / "whole")


def require_same_model(one: Path, other: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        assert (one / "model" / name).read_bytes() == (other / "model" / name).read_bytes()


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
    call = partial(function, *args, **changes)
    call() if size == 1 else ranks(size).run(call)


def train(run_dir: Path, **changes: Any) -> None:
    fit(recipe(run_dir, **changes))


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Where the undisturbed runs are, one a world."""
    return tmp_path_factory.mktemp("originals")


QUICK = [(world, world) for world in ("ddp×2", "fsdp×2 + offload")]
QUICK += [("ddp×2", "single"), ("ddp×2", "fsdp×2"), ("fsdp×2 + offload", "ddp×2")]
PAIRS = [
    pytest.param(world, target, marks=() if (world, target) in QUICK else pytest.mark.slow)
    for world in WORLDS
    for target in TARGETS
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "target"), PAIRS)
def test_any_world_resumes_what_any_other_saved(world, target, ranks, originals, tmp_path):
    whole, rest = originals / world, tmp_path / "rest"
    if not whole.exists():
        in_world(ranks, world, train, whole)
    in_world(ranks, target, resume, whole, rest, 2, run={"allow_change": ["memory"]})
    assert losses(rest) == pytest.approx(losses(whole), rel=1e-6)
    if world == target:
        assert losses(rest) == losses(whole)
        assert saved(rest, 6) == saved(whole, 6)


ORTHOGONAL = {"optim": dataclasses.replace(OPTIM, name="muon"), "run": {"allow_change": ["memory"]}}
OTHERS = [("single", "fsdp×2"), ("fsdp×2", "single"), ("ddp×2", "fsdp×2 + offload")]
OTHERS += [("fsdp×2 + offload", "fsdp×4")]


@pytest.mark.parametrize(
    ("world", "target"), [("fsdp×2", "ddp×2"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)]
)
def test_orthogonalized_updates_go_on_in_another_world(world, target, ranks, originals, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TARGETS", {key: _in_fp64(value) for key, value in TARGETS.items()})
    whole, rest = originals / f"muon {world}", tmp_path / "rest"
    if not whole.exists():
        in_world(ranks, world, train, whole, **ORTHOGONAL)
    in_world(ranks, target, resume, whole, rest, 2, **ORTHOGONAL)
    assert losses(rest) == pytest.approx(losses(whole), rel=ROUNDING)


def _in_fp64(world: tuple[int, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Muon rounds to bfloat16: in fp32, sums in another order often change what is next to a tie."""
    return world[0], world[1] | {"precision": "64-true"}


STRICT = {"run": {"deterministic": True, "allow_change": ["memory"]}}


@pytest.mark.slow
@pytest.mark.parametrize("world", ["single", "fsdp×2", pytest.param("fsdp×4", marks=pytest.mark.slow)])
def test_a_deterministic_run_is_the_same_bit_for_bit_on_any_ranks(world, ranks, originals, tmp_path):
    whole, rest = originals / "deterministic", tmp_path / "rest"
    if not whole.exists():
        in_world(ranks, "ddp×2", train, whole, **STRICT)
    in_world(ranks, world, resume, whole, rest, 2, **STRICT)
    assert losses(rest) == losses(whole)
    require_same_model(rest, whole)


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


def make_later(checkpoints: Path) -> None:
    """What a later version has written."""
    manifest = checkpoints / "step-00000006/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))


def names_in(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir()) if checkpoints.exists() else []


STEP, AUTO = "copy/checkpoints/step-0000000", {"resume": "auto"}


def damage_all(checkpoints: Path) -> None:
    for one in checkpoints.iterdir():
        damage(one / "state.json")


REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "all are corrupt": (damage_all, AUTO, {}),
    "the named one is corrupt": (lambda path: damage(path / "step-00000004/metrics.csv"), {"resume": f"{STEP}4"}, {}),
    "of a later version": (make_later, AUTO, {}),
    "no checkpoint": (shutil.rmtree, AUTO, {}),
    "another batch size": (None, {"resume": f"{STEP}2"}, {"batch_size": 12}),
    "no directory": (None, AUTO | {"dir": None}, {}),
    "a missing folder": (None, {"resume": "nowhere", "dir": "new"}, {}),
    "a directory of a run": (None, {}, {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_resumed_is_refused_and_stays(copied, case, golden, monkeypatch):
    spoil, run, changes = REFUSED[case]
    monkeypatch.chdir(copied.parent)
    if spoil is not None:
        spoil(copied / "checkpoints")
    before = names_in(copied / "checkpoints"), (copied / "metrics.csv").read_bytes()
    with golden.raises(RecipeError):
        fit(recipe(copied, run=run, **changes))
    assert (names_in(copied / "checkpoints"), (copied / "metrics.csv").read_bytes()) == before


def test_auto_takes_the_newest_and_a_finished_run_has_nothing_left_to_do(copied, finished, tmp_path):
    assert fit(recipe(copied, run=AUTO)).steps == 6
    assert losses(copied) == losses(finished)
    require_same_model(copied, finished)
    (tmp_path / "new").mkdir()  # without a checkpoint it starts anew
    (tmp_path / "new/metrics.csv").write_text("step\n1\n")
    fit(recipe(tmp_path / "new", run=AUTO))
    assert losses(tmp_path / "new") == losses(finished)


@pytest.mark.first(1)
@pytest.mark.parametrize(("data", "split"), [(Digits, "test"), (ValidatedDigits, "val")])
def test_a_run_that_is_resumed_at_its_end_is_evaluated(data, split, tmp_path):
    settings: dict[str, Any] = {"data": data(test_fraction=0.97), "model": MLP([16]), "max_steps": 2}
    first = fit(recipe(tmp_path / "r", run={"evaluate": True}, **settings))
    again = fit(recipe(tmp_path / "r", run=AUTO | {"evaluate": True}, **settings))
    assert again.metrics == first.metrics
    assert 0 < again.metrics[split]["accuracy"] < 1


def column(run_dir: Path, name: str) -> list[float]:
    with open(run_dir / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def test_a_finished_run_trains_on_when_more_epochs_are_allowed_by_the_schedule_of_the_longer_run(copied, tmp_path):
    fit(recipe(tmp_path / "three", epochs=3))
    fit(recipe(copied, epochs=3, run=AUTO | {"allow_change": ["epochs"]}))
    assert len(losses(copied)) == len(losses(tmp_path / "three")) == 9
    assert column(copied, "lr")[6:] == column(tmp_path / "three", "lr")[6:]
    assert min(column(copied, "lr")[6:]) > 0


@pytest.mark.parametrize("resume", ["auto", "copy"])
def test_a_corrupt_newest_checkpoint_is_passed_over_and_said(copied, finished, resume, capsys, monkeypatch):
    damage(copied / "checkpoints/step-00000006/rank-00000.safetensors")
    monkeypatch.chdir(copied.parent)
    fit(recipe(copied, run={"resume": resume}))  # which shows no progress
    output = capsys.readouterr().err
    assert "step-00000006/rank-00000.safetensors is corrupt" in output
    assert "resuming from step-00000004 instead" in output
    assert (copied / "checkpoints/step-00000006.corrupt").is_dir()
    assert saved(copied, 6) == saved(finished, 6)


@pytest.mark.parametrize(("resume", "after"), [(f"{STEP}2", (4, 6)), ("link/latest", (6,))])
def test_checkpoints_after_the_one_that_is_named_also_by_a_link_are_set_aside(
    copied, finished, resume, after, monkeypatch
):
    (copied.parent / "link").symlink_to(copied)
    (copied / "latest").symlink_to("checkpoints/step-00000004")
    monkeypatch.chdir(copied.parent)
    fit(recipe(copied, run={"resume": resume}))
    names = [f"step-0000000{step}" for step in (2, 4, 6)]
    assert names_in(copied / "checkpoints") == sorted(names + [f"step-0000000{step}.abandoned" for step in after])
    assert saved(copied, 6) == saved(finished, 6)


def test_tensorboard_shows_a_step_that_is_taken_again_once(tmp_path):
    logger = {"logger": ["tensorboard"]}
    fit(recipe(tmp_path, run=logger))
    fit(recipe(tmp_path, run=logger | {"resume": str(tmp_path / "checkpoints/step-00000002")}))
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 2
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in shown.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def fail_to_write(run_dir: Path) -> str:
    """The second rank's disk breaks in the second checkpoint; what each rank says."""
    whole = CheckpointWriter._write_own

    def broken(self, staging, snapshot):
        if self.rank == 1 and snapshot.step == 4:
            raise OSError(5, "Input/output error", str(staging))
        whole(self, staging, snapshot)

    CheckpointWriter._write_own = broken
    try:
        fit(recipe(run_dir))
    except RunError as error:
        return str(error)
    finally:
        CheckpointWriter._write_own = whole
    return "no error"


def test_a_rank_that_cannot_write_ends_all_and_the_older_checkpoint_stays(ranks, tmp_path):
    said = ranks(2).run(fail_to_write, tmp_path / "r")
    assert "rank 1: the checkpoint of step 4 could not be written: Input/output error" in said[0]
    assert said[1].startswith("the checkpoint of step 4 could not be written: Input/output error")
    assert names_in(tmp_path / "r/checkpoints") == ["step-00000002"]


def test_the_best_checkpoints_are_kept(tmp_path):
    wishes = Checkpoint(every=None, keep_last=1, keep_best=2)
    small = {"model": MLP([16]), "data": Digits(val_fraction=0.5, test_fraction=0.94)}
    fit(recipe(tmp_path / "r", eval_every=1, epochs=3, checkpoint=wishes, run={"evaluate": True}, **small))
    found = [json.loads(path.read_text()) for path in (tmp_path / "r/checkpoints").glob("*/manifest.json")]
    kept = sorted(manifest["figures"]["accuracy"] for manifest in found)
    assert kept[-2:] == sorted(column(tmp_path / "r", "val_accuracy"))[-2:]
    assert len(found) <= 3
    assert max(manifest["step"] for manifest in found) == len(losses(tmp_path / "r"))


class Failing(MLP):
    """Cannot take its fourth step."""

    micro_batches = 0

    def losses(self, module: nn.Module, batch: Any) -> Any:
        self.micro_batches += 1
        if self.micro_batches == 19:
            raise ZeroDivisionError
        yield from super().losses(module, batch)


def test_a_checkpoint_in_the_making_is_completed_when_the_run_fails(tmp_path, monkeypatch):
    write = CheckpointWriter.write
    monkeypatch.setattr(CheckpointWriter, "write", lambda writer, snapshot: (time.sleep(0.5), write(writer, snapshot)))
    with pytest.raises(ZeroDivisionError):
        fit(recipe(tmp_path / "r", model=Failing([16]), checkpoint=Checkpoint(every=3)))
    assert (tmp_path / "r/checkpoints/step-00000003/manifest.json").is_file()


@pytest.mark.parametrize(("every", "count"), [("1h", 0), ("0.000001s", 6)])
def test_a_checkpoint_is_due_by_the_clock_and_holds_no_secret_of_the_environment(every, count, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_veryverysecretvalue")
    fit(recipe(tmp_path / "r", model=MLP([16]), checkpoint=Checkpoint(every=every, keep_last=9)))
    assert len(names_in(tmp_path / "r/checkpoints")) == count
    for folder, _, names in os.walk(tmp_path / "r"):
        for name in names:
            assert b"hf_veryverysecretvalue" not in Path(folder, name).read_bytes()


class Updating(Listener):
    """Replaces all packages on the disk by others while the run trains."""

    def __init__(self, monkeypatch: Any) -> None:
        self.monkeypatch = monkeypatch

    def on_step(self, counters: Any, result: Any) -> None:
        self.monkeypatch.setattr(metadata, "version", lambda name: "99")


def test_a_checkpoint_names_the_versions_that_the_run_has_loaded(tmp_path, monkeypatch):
    loaded = versions()
    versions.cache_clear()  # as in a new process
    fit(recipe(tmp_path / "r", model=MLP([16]), listeners=[Updating(monkeypatch)]))
    assert read_manifest(tmp_path / "r/checkpoints/step-00000002").versions == loaded
