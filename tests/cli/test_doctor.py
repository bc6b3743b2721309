"""``trainer doctor``: every finding, provoked once."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from trainer import Checkpoint, Data, Memory, Optim, Recipe, Run
from trainer.cli import run
from trainer.commands.doctor import run_checks
from trainer.data import Digits, ImageFolder, TextFiles
from trainer.doctor import machine, samples
from trainer.doctor.context import CheckContext, findings
from trainer.fakegpu.prediction import Prediction
from trainer.launching.world import World
from trainer.models import LoRA, TextClassifier, VisionTransformer
from trainer.planner.predict import prepare_recipe
from trainer.system.lock import RunLock

if not sys.platform.startswith("linux"):
    pytest.skip("forks with the libraries loaded", allow_module_level=True)

TINY = {"patch_size": 4, "layers": 1, "heads": 2, "width": 16, "mlp_width": 32}


def vit(**settings):
    return VisionTransformer("custom", **TINY, **settings)


def subject_of(data=None, module=None, devices=1, ready=True, **settings):
    given = {"batch_size": 24, "memory": Memory(micro_batch_size=12), **settings}
    recipe = Recipe(model=module or vit(), data=data or Digits(), **given)
    return CheckContext(prepare_recipe(recipe) if ready else recipe, "own", World("python", "cpu", devices), ready)


def at(path, **settings):
    return subject_of(ready=False, run=Run(dir=str(path), **settings))


def found_by(check, *subject):
    """Status, text and fix of every finding of a check."""
    return [(one.status, f"{one.text}; {one.fix}") for one in findings("a check", partial(check, *subject))]


def finding_of(check, *subject):
    ((status, text),) = found_by(check, *subject)
    return status, text


def whole(folder):
    return subject_of(run=Run(dir=str(folder)))


def hoarder(folder):
    return subject_of(run=Run(dir=str(folder)), checkpoint=Checkpoint(keep_last=10**12))


def crowd(folder):
    return subject_of(Digits(workers=512), ready=False, devices=512)


@pytest.mark.parametrize(
    ("check", "subject", "patches", "status", "part"),
    [
        (machine.run_directory, lambda folder: at(folder / "a" / "b"), {}, "ok", "write, fsync, rename and lock work"),
        (machine.run_directory, at, {"SLOW_DISK_BYTES_PER_S": 1e15}, "warning", "checkpoint.every"),
        (machine.run_directory, lambda folder: at(folder / "file" / "b"), {}, "FAIL", "file is not a directory; "),
        (machine.run_directory, lambda _: at("/proc/doctor"), {}, "FAIL", "/proc"),
        (machine.disk_space, whole, {}, "ok", "3 checkpoints"),
        (machine.disk_space, hoarder, {}, "FAIL", "lower --checkpoint.keep_last"),
        (machine.disk_space, at, {}, "skipped", "unknown"),
        (machine.libraries, at, {}, "ok", "as required"),
        (
            machine.libraries,
            at,
            {"required_versions": lambda: ["torch>=99"]},
            "FAIL",
            "fit >=99; pip install 'torch>=99'",
        ),
        (machine.libraries, at, {"required_versions": lambda: ["absent>=1"]}, "FAIL", "absent is not installed"),
        (
            machine.libraries,
            at,
            {"required_versions": lambda: ["torch>=2", "absent; extra == 'lean'"]},
            "ok",
            "1 as required",
        ),
        (machine.devices, at, {}, "ok", "CPU"),
        (machine.devices, crowd, {}, "warning", "OMP_NUM_THREADS=1"),
        (machine.host_memory, whole, {}, "ok", "GB available"),
        (machine.host_memory, whole, {"available_bytes": lambda: 1000}, "FAIL", "fewer ranks"),
        (machine.shared_memory, at, {}, "ok", "0 worker(s)"),
        (machine.shared_memory, crowd, {"MIN_SHM_BYTES": 0.0}, "warning", "cores"),
        (machine.shared_memory, crowd, {"MIN_SHM_BYTES": 1e15}, "warning", "--shm-size"),
        (machine.round_trip, whole, {"hash_file": lambda path: "another"}, "FAIL", "other content than"),
        (machine.round_trip, whole, {"MAX_ROUND_TRIP_BYTES": 10.0}, "skipped", "only up to"),
        (samples.duplicates, whole, {}, "ok", "no test sample is in the training set"),
        ({}.__getitem__, lambda _: "x", {}, "FAIL", "the check ended with KeyError"),
    ],
)
def test_what_a_check_finds(tmp_path, monkeypatch, check, subject, patches, status, part):
    (tmp_path / "file").touch()
    for name, value in patches.items():
        monkeypatch.setattr(machine, name, value)
    found, text = finding_of(check, subject(tmp_path))
    assert (found, part in text) == (status, True), text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing is left behind


def test_a_directory_that_holds_a_run_and_one_that_is_in_use(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    first, second = found_by(machine.run_directory, at(tmp_path))
    lock.release()
    assert (first[0], second[0], "is in use by" in second[1]) == ("ok", "FAIL", True)
    (tmp_path / "recipe.yaml").touch()
    first, second = found_by(machine.run_directory, at(tmp_path))
    assert (first[0], second[0]) == ("FAIL", "ok")
    assert "already holds a run; --run.resume auto" in first[1]
    assert finding_of(machine.run_directory, at(tmp_path, resume="auto"))[0] == "ok"


def test_the_size_of_a_checkpoint_is_that_of_weights_and_state_and_a_copy_of_it_takes_memory(monkeypatch):
    for optim, tensors in ((Optim("adamw"), 3), (Optim("sgd"), 1), (Optim("sgd", momentum=0.9), 2)):
        subject = subject_of(optim=optim)
        weights = sum(p.numel() for p in subject.module.parameters()) * 4
        assert subject.checkpoint_bytes == tensors * weights + sum(b.nbytes for b in subject.module.buffers())
    monkeypatch.setattr(machine, "available_bytes", lambda: subject.checkpoint_bytes + 1)
    status, text = finding_of(machine.host_memory, subject)
    assert (status, "while a checkpoint is written; --checkpoint.asynchronous false" in text) == ("warning", True)


def test_a_checkpoint_takes_no_space_for_frozen_weights_of_a_file(tmp_path):
    file = str(tmp_path / "w.safetensors")
    save_file(subject_of().recipe.model.build().state_dict(), file)
    model = dataclasses.replace(vit(), lora=LoRA(rank=2, base="nf4"))
    adapted, plain = (subject_of(module=dataclasses.replace(model, weights=weights)) for weights in (file, None))
    trained = sum(p.numel() for p in adapted.module.parameters() if p.requires_grad) * 4
    assert adapted.checkpoint_bytes == 3 * trained
    frozen = sum(p.nbytes for p in adapted.module.parameters() if not p.requires_grad)
    assert adapted.state_bytes == plain.checkpoint_bytes == 3 * trained + frozen


def test_gpus_that_are_not_there_or_used_by_others():
    gpus = [{"name": "H200", "free": free, "total_memory": 150e9} for free in (140e9, 10e9)]
    assert [finding.status for finding in machine.check_gpus(gpus, 3)] == ["FAIL", "ok", "warning"]
    assert [finding.status for finding in machine.check_gpus(gpus, 1)] == ["ok"]


def test_ranks_that_meet_also_from_within_a_group_and_ranks_that_do_not(monkeypatch):
    joined = torch.distributed.is_initialized()
    if not joined:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        status, text = finding_of(machine.process_group, subject_of(ready=False, devices=2))
    finally:
        if not joined:
            torch.distributed.destroy_process_group()
    assert status == "ok", text
    assert "gloo, 2 rank(s) met" in text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.setattr(machine, "RENDEZVOUS_TIMEOUT", 1.0)
    status, text = finding_of(machine.process_group, subject_of(ready=False, devices=2))
    assert (status, "GLOO_SOCKET_IFNAME" in text) == ("FAIL", True)


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


def test_data_that_cannot_be_prepared_or_does_not_fit_the_model(tmp_path):
    subject = subject_of(ImageFolder(root=str(tmp_path / "nowhere")), ready=False)
    status, text = finding_of(samples.model_and_data, subject)
    assert (status, "nowhere" in text, subject.ready) == ("FAIL", True, False)
    subject = subject_of(Points([point(0)]), vit(num_classes=2), ready=False)
    status, text = finding_of(samples.model_and_data, subject)
    assert status == "FAIL"
    assert "model.num_classes=2 does not fit the data, which has 3" in text


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([point(0), point(1, label=3)], "label 3 is not one of the classes 0 to 2"),
        ([point(0), point(1, label=torch.tensor([0, -1]))], "label -1 is not one"),
        ([point(0), point(float("nan"))], "pixels are not finite"),
        (Broken([point(0), point(1)]), "train sample 1 cannot be loaded: OSError: unreadable"),
    ],
)
def test_a_sample_that_will_not_do(content, what):
    subject = subject_of(Points(content), vit())
    status, text = finding_of(samples.samples, subject)
    assert (status, what in text) == ("FAIL", True), text
    subject.recipe.data.max_bad_samples = 1
    allowed = "warning" if isinstance(content, Broken) else "FAIL"
    assert finding_of(samples.samples, subject)[0] == allowed


def test_many_bad_samples_are_summed_up():
    found = found_by(samples.samples, subject_of(Points([point(i, label=9) for i in range(50)]), vit()))
    assert [status for status, _ in found] == ["FAIL"] * 4
    assert "47 more of the loaded samples" in found[3][1]


def test_samples_of_the_training_set_in_the_test_set():
    subject = subject_of(Points([point(0), point(1), point(2)], [point(7), point(1)]), vit())
    status, text = finding_of(samples.duplicates, subject)
    assert status == "warning"
    assert "1 of the test samples (1) are also in the training set: test sample 1 equals train sample 1" in text
    assert finding_of(samples.duplicates, subject_of(Points([point(0)]), vit()))[0] == "skipped"


def test_images_that_lose_something_and_the_same_file_twice(tmp_path):
    def picture(name, mode, colour):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (8, 8), colour).save(tmp_path / name)

    for part, blue in (("train", 3), ("test", 200)):
        picture(f"{part}/cat/a.png", "RGB", (1, 2, blue))
        picture(f"{part}/ship/a.png", "RGB", (9, 9, blue))
    picture("train/cat/b.png", "RGBA", (1, 2, 3, 4))
    picture("test/ship/b.png", "RGBA", (1, 2, 3, 4))
    subject = subject_of(ImageFolder(root=str(tmp_path), image_size=8))
    found = found_by(samples.samples, subject)
    assert [status for status, _ in found] == ["ok", "warning", "ok", "warning"]
    assert "1 of mode RGBA (such as " in found[1][1]
    status, text = finding_of(samples.duplicates, subject)
    assert status == "warning"
    assert "1 of the test samples" in text
    assert "train/cat/b.png" in text


def test_texts_that_say_nothing_or_are_there_twice_and_a_tokenizer_of_more_words(sample_data, tmp_path):
    content = {"train": [("fine", "0"), ("\u200b", "1")], "test": [("fine", "0"), ("new", "1")]}
    for name, rows in content.items():
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    files = {f"{name}_file": str(tmp_path / f"{name}.csv") for name in content}
    data = TextFiles(**files, max_length=32, cache_dir=str(tmp_path / "cache"))
    config = {"n_layers": 1, "dim": 16, "n_heads": 2, "hidden_dim": 32, "vocab_size": 1000}
    tokenizer = str(sample_data / "tokenizers" / "bert-base-uncased")
    subject = subject_of(data, TextClassifier("distilbert", tokenizer=tokenizer, config=config))
    found = found_by(samples.samples, subject)
    assert [status for status, _ in found] == ["FAIL", "ok"]
    assert "row 3" in found[0][1]
    assert "the text is empty" in found[0][1]
    status, text = finding_of(samples.duplicates, subject)
    assert (status, "train.csv row 2" in text) == ("warning", True)
    status, text = finding_of(samples.vocabulary, subject)
    assert (status, "30,522 tokens, 1,000 embedding rows" in text) == ("FAIL", True)
    subject.module.get_input_embeddings().num_embeddings = 30522
    assert finding_of(samples.vocabulary, subject)[0] == "ok"
    assert found_by(samples.vocabulary, subject_of()) == []


@pytest.mark.slow
def test_a_run_that_does_not_fit_the_device(monkeypatch):
    monkeypatch.setattr("trainer.fakegpu.target.usable_memory", lambda device, size: 1000)
    status, text = finding_of(machine.PeakMemory(subject_of()).finding)
    assert (status, "--memory.budget" in text) == ("FAIL", True)
    assert finding_of(machine.PeakMemory(subject_of(memory=Memory(budget="2GB"))).finding)[0] == "skipped"


def test_a_run_that_fits_when_torch_gives_its_cache_back(monkeypatch):
    answer = Prediction(10, 10**15, 0, {}, {}, [], "forward", {}, {}, 0.0, retries=2)
    monkeypatch.setattr(machine, "predict_in_process", lambda *_, capacity: vars(answer))
    status, text = finding_of(machine.PeakMemory(subject_of()).finding)
    assert (status, "fits after 2 allocator retries" in text) == ("warning", True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_else_is_looked_at():
    recipe = Recipe(model=vit(), data=Digits(), batch_size=24, run=Run(accelerator="cuda"))
    (finding,) = run_checks(recipe, "own")
    assert (finding.status, "no NVIDIA GPU found" in finding.text) == ("FAIL", True)


@pytest.mark.slow
def test_the_packaged_recipe_is_well_and_a_failed_check_is_exit_code_1(capsys, tmp_path):
    words = ["doctor", "vit_digits", "--model.layers=1", "--run.dir", str(tmp_path)]
    assert run([*words, "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["failed"] == 0
    status = {finding["check"]: finding["status"] for finding in report["findings"]}
    assert {status[name] for name in ("disk space", "process group", "checkpoint", "test samples")} == {"ok"}
    assert status["peak memory"] in ("ok", "warning")  # of the memory that others leave
    assert len(captured.err.splitlines()) >= len(report["findings"])
    (tmp_path / "recipe.yaml").touch()
    assert run(words) == 1
    captured = capsys.readouterr()
    assert "FAIL     run directory" in captured.out
    assert "ok       checkpoint" in captured.out
    assert "trainer: error: 1 finding(s) would make the run fail: run directory" in captured.err
