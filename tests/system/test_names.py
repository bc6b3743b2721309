"""Names that came from outside are one line, without what steers a terminal, wherever they are printed."""

from __future__ import annotations

import io
import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from trainer.after.predict import predict
from trainer.checkpoint.manifest import Manifest
from trainer.cli import _exit_code, run
from trainer.commands import doctor as command
from trainer.contract import Data, Model
from trainer.doctor.context import ok, warning
from trainer.engine.quarantine import BadSampleAt, Quarantine
from trainer.errors import RunStoppedError
from trainer.faults.heartbeats import EndReason
from trainer.faults.watchdog import PeerError
from trainer.report.metrics import EvaluationResult
from trainer.report.progress import Progress
from trainer.run.directory import report_text
from trainer.run.listeners import report_bad_samples
from trainer.supervise.attempt import Journal
from trainer.supervise.supervisor import announce
from trainer.system.error_reports import report, set_location
from trainer.values import BadSample

NAME = "a\x1b[2J\x1b]0;b\x07\x9b2J\u202ec\udcff\r\ntrainer: error: forged"
IN_UTF8 = NAME.replace("\udcff", "")
MEANT = r"a\x1b[2J\x1b]0;b\x07\x9b2J\u202ec"
"""How it begins wherever it is printed."""


class Digits(Model, Data):
    """Classes and a model of such names, for ``predict``."""

    class_names = (NAME, f"{NAME}2")
    encode, answers = None, False

    def build(self):
        import torch

        return torch.nn.Linear(4, 2)

    def losses(self, module, batch):
        yield SimpleNamespace(logits=module(batch["pixel_values"]))

    def load_image(self, path):
        import torch

        return torch.ones(4)


def a_manifest(folder):
    path = folder / "checkpoints" / "step-00000001"
    path.mkdir(parents=True)
    texts = dict.fromkeys(("run", "plan", "dataset", "created"), IN_UTF8)
    numbers = dict.fromkeys(("step", "epoch", "step_in_epoch", "seed", "world_size"), 1)
    found = Manifest(**texts, **numbers, recipe={}, tokenizer=None, versions={}, figures={IN_UTF8: 0.5}, files={})
    (path / "manifest.json").write_text(found.to_json(), encoding="utf-8")
    assert run(["checkpoint", "list", str(folder)]) == 0


PRINTED = {
    "a finding": lambda: print(ok(NAME, check="samples").line(), warning("fine", NAME, "samples").line(), sep="\n"),
    "a bad sample": lambda: report_bad_samples(Quarantine(9), [BadSampleAt("train", BadSample(3, NAME, NAME))], None),
    "what another rank tells": lambda: report(PeerError(EndReason(NAME).text)),
}
COMMANDS = {
    "a checkpoint": (["checkpoint", "verify", f"FOLDER/{NAME}"], 1),
    "a flag": (["fit", "vit_digits", f"--{NAME}", "1"], 2),
    "a value": (["fit", "vit_digits", "--run.devices", NAME], 2),
    "a recipe": (["fit", NAME], 2),
    "a key of YAML": (["fit", "FOLDER/r.yaml"], 2),
    "a run directory": (["evaluate", f"FOLDER/{NAME}2"], 2),
}


def a_command(name, folder):
    (folder / NAME / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "r.yaml").write_text("recipe: vit_digits\n" + json.dumps(IN_UTF8) + ": 1\n")
    words, code = COMMANDS[name]
    assert run([word.replace("FOLDER", str(folder)) for word in words]) == code


def an_image(folder):
    for kind in ("cat", "dog"):
        for number in range(8):
            path = folder / "images" / "train" / kind / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8)).save(path)
    (folder / "images" / "train" / "cat" / f"{NAME}.png").write_bytes(b"no image")
    recipe = folder / "own.py"
    recipe.write_text(
        "from trainer import Recipe, Run\nfrom trainer.data import ImageFolder\nfrom trainer.models import MLP\n"
        f"data = ImageFolder(root={str(folder / 'images')!r}, image_size=8, val_fraction=0.25)\n"
        "recipe = Recipe(model=MLP([4]), data=data, batch_size=4, run=Run(predict=False))\n"
    )
    assert run(["fit", str(recipe), "--run.dir", str(folder / "run")]) == 2


def classes_of_a_report(folder):
    confusion = np.array([[1, 0], [0, 1]])
    result = EvaluationResult(0.0, {NAME: 0.0}, {NAME: 1.0}, 1.0, 2, confusion)
    print(report_text(result, Digits()))
    print(report_text(EvaluationResult(math.nan, {NAME: 0.0}, {}, None, None, None), Digits()))


def classes_of_a_prediction(folder):
    image = folder / NAME
    image.touch()
    recipe = SimpleNamespace(model=Digits(), data=Digits(), replace=lambda **changes: recipe)
    predict(recipe, folder, images=[str(image)])


def a_message_of_an_error(folder):
    for error in (ValueError(NAME), RuntimeError(f"Connection closed by peer {NAME}")):
        set_location(error, f"rank 0, step 3, loading, {NAME}")
        assert _exit_code(error) == 1


def a_reason_to_stop(folder):
    assert _exit_code(RunStoppedError(NAME)) == 75


def progress(folder):
    shown = Progress()
    shown.message(NAME)
    shown.notice(NAME)
    shown.warning(NAME)
    shown.evaluation(1, "val", {NAME: 1.0})


def a_supervised_run(folder):
    announce(SimpleNamespace(run_dir=NAME, argv=list))
    journal = Journal(folder / NAME, [])  # there is no such folder
    journal.close("failed")


PLACES = (
    *(a_manifest, an_image, classes_of_a_report, classes_of_a_prediction, a_message_of_an_error),
    *(a_reason_to_stop, progress, a_supervised_run),
)


@pytest.mark.parametrize(
    "place",
    [
        *(pytest.param(place, id=place.__name__) for place in PLACES),
        *(pytest.param(partial(a_command, name), id=name) for name in COMMANDS),
        *(pytest.param(lambda folder, put=put: put(), id=name) for name, put in PRINTED.items()),
    ],
)
def test_a_name_from_outside_is_one_line_that_steers_nothing(place, tmp_path, capsysbinary, monkeypatch):
    monkeypatch.setattr("trainer.after.predict.load_model", lambda model, folder: model.build())
    place(tmp_path)
    out, err = capsysbinary.readouterr()
    printed = (out + err).decode()
    assert [character for character in printed if not character.isprintable() and character not in "\n\t"] == []
    assert [line for line in printed.splitlines() if line.startswith("trainer: error: forged")] == []
    assert MEANT in printed or MEANT in printed.replace("\\\\", "\\")


def test_a_program_gets_the_names_as_they_are(monkeypatch, capsys):
    monkeypatch.setattr(command, "run_checks", lambda recipe, reference: iter([ok(NAME)]))
    command.report(SimpleNamespace(), NAME, as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out)["findings"][0]["text"] == NAME
    assert out.isascii()
    assert err.count("\n") == 1


def test_above_a_bar_as_well():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    shown = Progress(stream=stream)
    shown.start(3)
    shown.notice(NAME)
    shown.close()
    assert MEANT + r"\udcff\r\ntrainer" in stream.getvalue()
    assert "\x07" not in stream.getvalue()
