"""``trainer doctor``: every finding, provoked once."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass, field

import pytest
import torch
from PIL import Image

from trainer import Checkpoint, Data, Memory, Optim, Recipe, Run
from trainer.cli import run
from trainer.commands.doctor import examine
from trainer.data import Digits, ImageFolder, TextFiles
from trainer.doctor import machine, samples
from trainer.doctor import machine as disk
from trainer.doctor import probes as ranks
from trainer.doctor import probes as trial
from trainer.doctor import samples as model
from trainer.doctor.finding import findings
from trainer.doctor.subject import Subject
from trainer.launching.world import World
from trainer.models import TextClassifier, VisionTransformer
from trainer.planner.predict import prepared
from trainer.system.lock import RunLock

if not sys.platform.startswith("linux"):
    pytest.skip("forks with the libraries loaded", allow_module_level=True)

TINY = {"patch_size": 4, "layers": 1, "heads": 2, "width": 16, "mlp_width": 32}


def subject_of(data=None, module=None, devices=1, ready=True, **settings):
    recipe = Recipe(
        model=module or VisionTransformer("custom", **TINY),
        data=data or Digits(),
        **{"batch_size": 24, "memory": Memory(micro_batch_size=12), **settings},
    )
    return Subject(prepared(recipe) if ready else recipe, "own", World("python", "cpu", devices), ready)


def only(found):
    """The findings as (status, text and fix)."""
    return [(finding.status, f"{finding.text}; {finding.fix}") for finding in found]


def the_one(found):
    (finding,) = only(found)
    return finding


# ----------------------------------------------------------------------------------------------------------- the disk


def at(path, **settings):
    return subject_of(ready=False, run=Run(dir=str(path), **settings))


def test_a_directory_that_can_be_used(tmp_path):
    status, text = the_one(disk.run_directory(at(tmp_path / "new" / "run")))
    assert status == "ok"
    assert f"{tmp_path}: write, fsync, rename and lock work" in text
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_a_directory_that_holds_a_run(tmp_path):
    (tmp_path / "recipe.yaml").touch()
    first, second = only(disk.run_directory(at(tmp_path)))
    assert first[0] == "FAIL"
    assert "already holds a run; --run.resume auto" in first[1]
    assert second[0] == "ok"
    assert the_one(disk.run_directory(at(tmp_path, resume="auto")))[0] == "ok"


def test_a_directory_that_is_in_use(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    found = only(disk.run_directory(at(tmp_path)))
    lock.release()
    assert [status for status, _ in found] == ["ok", "FAIL"]
    assert "is in use by" in found[1][1]


def test_a_file_in_the_way_and_a_place_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    assert the_one(disk.run_directory(at(tmp_path / "file" / "run"))) == (
        "FAIL",
        f"{tmp_path / 'file'} is not a directory; another --run.dir",
    )
    assert the_one(disk.run_directory(at("/proc/doctor")))[0] == "FAIL"


def test_a_slow_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "SLOW", 1e15)
    status, text = the_one(disk.run_directory(at(tmp_path)))
    assert (status, "checkpoint.every" in text) == ("warning", True)


def test_space_for_the_checkpoints(tmp_path):
    enough = subject_of(run=Run(dir=str(tmp_path)))
    status, text = the_one(disk.space(enough))
    assert status == "ok"
    assert "3 checkpoints" in text
    hoarder = subject_of(run=Run(dir=str(tmp_path)), checkpoint=Checkpoint(keep_last=10**12))
    status, text = the_one(disk.space(hoarder))
    assert (status, "lower --checkpoint.keep_last" in text) == ("FAIL", True)
    assert the_one(disk.space(subject_of(ready=False)))[0] == "skipped"


@pytest.mark.parametrize(
    ("name", "options", "tensors"), [("adamw", {}, 3), ("sgd", {}, 1), ("sgd", {"momentum": 0.9}, 2)]
)
def test_the_size_of_a_checkpoint_is_that_of_weights_and_state(name, options, tensors):
    subject = subject_of(optim=Optim(name, lr=0.1, **options))
    weights = sum(p.numel() for p in subject.module.parameters()) * 4
    assert subject.checkpoint_bytes == tensors * weights + sum(b.nbytes for b in subject.module.buffers())


# -------------------------------------------------------------------------------------------------------- the machine


def test_libraries_that_do_not_fit(monkeypatch):
    assert the_one(machine.libraries(at("run")))[0] == "ok"
    monkeypatch.setattr(machine, "required", lambda: ["torch>=99", "no-such-package>=1", "torch>=2; extra == 'lean'"])
    status, text = the_one(machine.libraries(at("run")))
    assert status == "FAIL"
    assert "does not fit >=99" in text
    assert "no-such-package is not installed" in text
    assert "pip install 'torch>=99' 'no-such-package>=1'" in text


def test_more_threads_than_cores():
    assert the_one(machine.devices(subject_of(ready=False)))[0] == "ok"
    status, text = the_one(machine.devices(subject_of(ready=False, devices=512)))
    assert (status, "OMP_NUM_THREADS=1" in text) == ("warning", True)


def test_gpus_that_are_not_there_and_gpus_that_others_use():
    found = [{"name": "H200", "free": free, "total_memory": 150e9} for free in (140e9, 10e9)]
    assert [finding.status for finding in machine.of_gpus(found, 3)] == ["FAIL", "ok", "warning"]
    assert [finding.status for finding in machine.of_gpus(found, 1)] == ["ok"]


def test_host_memory_that_does_not_suffice(monkeypatch):
    assert the_one(machine.host_memory(subject_of()))[0] == "ok"
    subject = subject_of()
    monkeypatch.setattr(machine, "available_bytes", lambda: subject.checkpoint_bytes + 1)
    status, text = the_one(machine.host_memory(subject))
    assert status == "warning"
    assert "of a copy while a checkpoint is written; --checkpoint.asynchronous false" in text
    monkeypatch.setattr(machine, "available_bytes", lambda: 1000)
    assert the_one(machine.host_memory(subject))[0] == "FAIL"


def test_workers_without_shared_memory_and_more_of_them_than_cores(monkeypatch):
    assert the_one(machine.shared_memory(subject_of(ready=False)))[0] == "ok"
    many = subject_of(Digits(workers=512), ready=False)
    monkeypatch.setattr(machine, "SMALL_SHARED", 0.0)
    assert "cores" in the_one(machine.shared_memory(many))[1]
    monkeypatch.setattr(machine, "SMALL_SHARED", 1e15)
    status, text = the_one(machine.shared_memory(many))
    assert (status, "--shm-size" in text) == ("warning", True)


def test_ranks_meet_when_this_process_is_in_a_group_itself():
    joined = torch.distributed.is_initialized()
    if not joined:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        status, text = the_one(ranks.process_group(subject_of(ready=False, devices=2)))
        assert status == "ok", text
    finally:
        if not joined:
            torch.distributed.destroy_process_group()


def test_ranks_that_meet_and_ranks_that_do_not(monkeypatch):
    status, text = the_one(ranks.process_group(subject_of(ready=False, devices=2)))
    assert status == "ok"
    assert "gloo, 2 rank(s) met" in text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.setattr(ranks, "SECONDS", 10.0)
    status, text = the_one(ranks.process_group(subject_of(ready=False, devices=2)))
    assert (status, "GLOO_SOCKET_IFNAME" in text) == ("FAIL", True)


# --------------------------------------------------------------------------------------------------- model and data


@dataclass
class Points(Data):
    """Samples that a test writes down."""

    content: list = field(default_factory=list)
    tests: list = field(default_factory=list)
    num_classes: int = 3
    image_size: int = 8

    def prepare(self, tokenizer=None):
        self.train, self.test = self.content, self.tests or None


def point(value, label=0):
    return {"pixel_values": torch.full((1, 8, 8), float(value)), "labels": label}


class Broken(list):
    def __getitem__(self, index):
        if index == 1:
            raise OSError("unreadable")
        return super().__getitem__(index)


def vit(**settings):
    return VisionTransformer("custom", **TINY, **settings)


def test_data_that_cannot_be_prepared(tmp_path):
    subject = subject_of(ImageFolder(root=str(tmp_path / "nowhere")), ready=False)
    status, text = the_one(model.model_and_data(subject, prepared))
    assert (status, "nowhere" in text, subject.ready) == ("FAIL", True, False)


def test_a_number_of_classes_that_is_not_the_data_s():
    subject = subject_of(Points([point(0)]), vit(num_classes=2), ready=False)
    status, text = the_one(model.model_and_data(subject, prepared))
    assert status == "FAIL"
    assert "model.num_classes=2 does not fit the data, which has 3" in text


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([point(0), point(1, label=3)], "label 3 is none of the 3 classes"),
        ([point(0), point(1, label=-1)], "label -1 is none"),
        ([point(0), point(float("nan"))], "pixels are not finite"),
        (Broken([point(0), point(1)]), "train sample 1 cannot be loaded: OSError: unreadable"),
    ],
)
def test_a_sample_that_will_not_do(content, what):
    status, text = the_one(samples.samples(subject_of(Points(content), vit())))
    assert status == "FAIL"
    assert what in text


def test_a_sample_that_cannot_be_loaded_may_be_allowed():
    data = Points(Broken([point(0), point(1)]))
    data.max_bad_samples = 1
    assert the_one(samples.samples(subject_of(data, vit())))[0] == "warning"


def test_many_bad_samples_are_summed_up():
    found = only(samples.samples(subject_of(Points([point(i, label=9) for i in range(50)]), vit())))
    assert [status for status, _ in found] == ["FAIL"] * 4
    assert "47 more of the samples" in found[3][1]


def test_samples_of_the_training_set_in_the_test_set():
    subject = subject_of(Points([point(0), point(1), point(2)], [point(7), point(1)]), vit())
    status, text = the_one(samples.duplicates(subject))
    assert status == "warning"
    assert "1 of the test samples (1) are in the training set, too: test sample 1 is train sample 1" in text
    assert the_one(samples.duplicates(subject_of(Points([point(0)]), vit())))[0] == "skipped"
    assert the_one(samples.duplicates(subject_of()))[0] == "ok"


def picture(path, mode, colour):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (8, 8), colour).save(path)


def test_images_that_lose_something_and_the_same_file_twice(tmp_path):
    for part in ("train", "test"):
        for name, colour in (("cat", (1, 2, 3)), ("ship", (9, 9, 9))):
            picture(tmp_path / part / name / "a.png", "RGB", (*colour[:2], 3 if part == "train" else 200))
    picture(tmp_path / "train" / "cat" / "b.png", "RGBA", (1, 2, 3, 4))
    picture(tmp_path / "test" / "ship" / "b.png", "RGBA", (1, 2, 3, 4))
    subject = subject_of(ImageFolder(root=str(tmp_path), image_size=8))
    found = only(samples.samples(subject))
    assert [status for status, _ in found] == ["ok", "warning", "ok", "warning"]
    assert "1 of mode RGBA (such as " in found[1][1]
    status, text = the_one(samples.duplicates(subject))
    assert status == "warning"
    assert "1 of the test samples" in text
    assert "train/cat/b.png" in text


@pytest.fixture
def texts(sample_data, tmp_path):
    """A function that makes the subject of a text recipe."""

    def make(rows, test_rows=(("other", "0"), ("words", "1")), vocabulary=30522):
        for name, content in (("train", rows), ("test", test_rows)):
            with (tmp_path / f"{name}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([("text", "label"), *content])
        tokenizer = str(sample_data / "tokenizers" / "bert-base-uncased")
        config = {"n_layers": 1, "dim": 16, "n_heads": 2, "hidden_dim": 32, "vocab_size": vocabulary}
        files = {f"{name}_file": str(tmp_path / f"{name}.csv") for name in ("train", "test")}
        data = TextFiles(**files, max_length=32, cache_dir=str(tmp_path / "cache"))
        return subject_of(data, TextClassifier("distilbert", tokenizer=tokenizer, config=config))

    return make


def test_a_text_that_says_nothing_to_the_tokenizer_and_one_that_is_there_twice(texts):
    subject = texts([("fine", "0"), ("\u200b", "1")], [("fine", "0"), ("new", "1")])
    found = only(samples.samples(subject))
    assert [status for status, _ in found] == ["FAIL", "ok"]
    assert "row 3" in found[0][1]
    assert "the text is empty" in found[0][1]
    status, text = the_one(samples.duplicates(subject))
    assert status == "warning"
    assert "train.csv row 2" in text


def test_a_tokenizer_of_more_words_than_the_model_has(texts):
    rows = [("fine", "0"), ("bad", "1")]
    assert the_one(model.vocabulary(texts(rows)))[0] == "ok"
    status, text = the_one(model.vocabulary(texts(rows, vocabulary=1000)))
    assert (status, "30,522 tokens, 1,000 rows" in text) == ("FAIL", True)
    assert list(model.vocabulary(subject_of())) == []


# -------------------------------------------------------------------------------------------- memory and checkpoints


def test_a_run_that_does_not_fit_the_device(monkeypatch):
    assert the_one(trial.PeakMemory(subject_of()).look())[0] == "ok"
    monkeypatch.setattr("trainer.planner.target.usable_memory", lambda device, size: 1000)
    status, text = the_one(trial.PeakMemory(subject_of()).look())
    assert (status, "--memory.budget" in text) == ("FAIL", True)
    assert the_one(trial.PeakMemory(subject_of(memory=Memory(budget="2GB"))).look())[0] == "skipped"


def test_a_checkpoint_that_does_not_come_back(monkeypatch):
    status, text = the_one(trial.round_trip(subject_of()))
    assert (status, "bit for bit" in text) == ("ok", True)
    monkeypatch.setattr(trial, "hash_file", lambda path: "another")
    assert the_one(trial.round_trip(subject_of()))[0] == "FAIL"
    monkeypatch.setattr(trial, "LARGEST", 10.0)
    assert the_one(trial.round_trip(subject_of()))[0] == "skipped"


# -------------------------------------------------------------------------------------------------------- the command


def test_a_check_that_fails_itself_is_a_finding():
    def look():
        raise KeyError("x")
        yield

    assert "the check ended with KeyError" in the_one(findings("any", look))[1]


def test_without_a_device_nothing_else_is_looked_at():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    recipe = Recipe(model=vit(), data=Digits(), batch_size=24, run=Run(accelerator="cuda"))
    status, text = the_one(examine(recipe, "own"))
    assert (status, "torch sees no CUDA device" in text) == ("FAIL", True)


def test_the_packaged_recipe_is_well(capsys, tmp_path):
    assert run(["doctor", "vit_digits", "--run.dir", str(tmp_path / "run"), "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["failed"] == 0
    assert report["seconds"] < 60
    assert {finding["check"] for finding in report["findings"]} >= {"disk space", "process group", "peak memory"}
    assert len(captured.err.splitlines()) >= len(report["findings"])


def test_a_failed_check_is_exit_code_1_and_the_others_are_made(capsys, tmp_path):
    (tmp_path / "recipe.yaml").touch()
    assert run(["doctor", "vit_digits", "--run.dir", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "FAIL     run directory" in captured.out
    assert "ok       checkpoint" in captured.out
    assert "trainer: error: 1 finding(s) that the run would fail of: run directory" in captured.err
