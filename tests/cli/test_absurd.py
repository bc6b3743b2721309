"""Absurd numbers and names: refused at once in a line that names them, with exit code 2."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from trainer.checkpoint.folder import CheckpointFolder, is_checkpoint
from trainer.cli import run
from trainer.commands.flags import RecipeParser, _union_members
from trainer.commands.recipes import load_recipe, packaged_recipes
from trainer.commands.runs import inputs
from trainer.data import Digits
from trainer.engine.cut import Cut
from trainer.engine.loop import count_steps, epoch_at
from trainer.engine.window import Windows
from trainer.errors import RecipeError
from trainer.launching.slurm import slurm_task
from trainer.launching.world import detect_world, resolve_world
from trainer.recipe import Checkpoint, Memory, Optim, Run
from trainer.settings import change, dump_recipe
from trainer.system.environment import NUMBERS, read_int_variable
from trainer.system.processes import trainer_command

SMALL = ["vit_digits", "--model.layers=1", "--model.width=8", "--model.mlp_width=8", "--max_steps=1"]
QUICK = [*SMALL, "--run.evaluate=false", "--run.predict=false", "--run.accelerator=cpu"]


@pytest.fixture
def refused(capfd):
    """A function: a command line must be refused in one line that has all of ``parts`` in it."""

    def check(*words, parts=()):
        capfd.readouterr()
        assert run([str(word) for word in words]) == 2
        out, err = capfd.readouterr()
        lines = [line for line in err.splitlines() if "trainer: error: " in line]
        assert (out, "Traceback" in err, len(lines), err.splitlines()[-1:]) == ("", False, 1, lines)
        assert [part for part in parts if str(part) not in lines[0]] == [], lines
        assert len(lines[0]) < 500
        return lines[0]

    return check


@pytest.mark.parametrize("text", ["abc", "", "-1", "1.5", "1e9", "٣", "9" * 400, "\x1b[2J"])
def test_a_variable_that_is_no_number_is_refused_by_name(monkeypatch, refused, text):
    for name in NUMBERS:
        with monkeypatch.context() as patch:
            patch.setenv(name, text)
            line = refused("fit", "vit_digits", parts=[f"{name}={text[:20]!r}"[:-1], "in the environment", "unset it"])
        assert line.startswith("trainer: error: ")  # and is no rank of a name like that
    monkeypatch.setenv("MASTER_PORT", "99999")
    refused("fit", "vit_digits", parts=["MASTER_PORT='99999'", "from 0 to 65535"])


def test_before_a_library_ends_with_a_traceback(tmp_path):
    """Lightning reads some of them while it is imported."""
    environment = {**os.environ, "LT_CLI_USED": "x", "SLURM_JOB_ID": "1"}
    words = trainer_command("fit", "vit_digits", f"--run.dir={tmp_path / 'run'}")
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("trainer: error: LT_CLI_USED='x' in the environment")
    assert not (tmp_path / "run").exists()


def test_a_launcher_that_did_not_say_all_is_refused():
    recipe = load_recipe("vit_digits")[0]
    launched = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    worker = dict.fromkeys(("RAY_JOB_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"), "0")
    for environment in ({"TORCHELASTIC_RUN_ID": "x"}, launched | {"GROUP_WORLD_SIZE": "x"}, step, worker):
        with pytest.raises(ValueError, match=r"(_SIZE|SLURM_JOB_ID).*environment|Ray has put 0"):
            detect_world(recipe, environment)
    with pytest.raises(ValueError, match="LT_CLI_USED='yes'"):
        resolve_world(recipe, {"LT_CLI_USED": "yes"})
    assert slurm_task({"SLURM_STEP_ID": "4294967294", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert (read_int_variable("X", 3, {}), read_int_variable("X", 3, {"X": "05"})) == (3, 5)


@pytest.mark.parametrize("text", ["x", "[]", '{"pid": 1}'])
def test_a_variable_of_ours_that_nobody_wrote_is_refused(monkeypatch, refused, tmp_path, text):
    monkeypatch.setenv("TRAINER_SUPERVISOR", text)
    refused("fit", *QUICK, f"--run.dir={tmp_path / 'run'}", parts=[f"TRAINER_SUPERVISOR={text!r}", "unset it"])


ABSURD = [str(10**12), "-1", "0", "nan", "inf", "1e308", "1e-320", "9" * 400, "1" * 5000]


@pytest.mark.slow
def test_an_absurd_number_is_refused_in_a_line_or_taken_as_it_is(refused):
    """Every setting that may be a number, of some recipe that has it."""
    seen = set()
    for name in packaged_recipes():
        recipe, source = load_recipe(name)
        parser = RecipeParser(recipe)
        numeric = {key for key, one in parser.settings.items() if {int, float} & {*_union_members(one.hint)}} - seen
        seen |= numeric
        for key, text in itertools.product(sorted(numeric), ABSURD):
            try:
                said = dump_recipe(change(recipe, parser.read_flags([(key, text)], {})), source)
            except RecipeError as error:
                said = str(error)
                assert len(said) < 450, "a number need not be repeated"
                assert "\n" not in said
            else:
                assert math.isfinite(float(text)) or key == "optim.clip_norm", (key, text)
                assert abs(float(text)) < 1e300 or text == "1e308", (key, text)
            assert key.rpartition(".")[2] in said
    assert len(seen) > 40
    refused("fit", "vit_digits", "--epochs", "1" * 5000, parts=["epochs has 5000 digits"])


def test_a_size_that_no_machine_has_is_refused_before_it_is_tried(refused, tmp_path):
    sizes = [f"--{key}={10**12}" for key in ("model.num_classes", "model.layers", "data.image_size", "run.devices")]
    odd = ["--model.num_classes=0", "--model.image_size=-1", "--data.workers=100000", "--data.worker_timeout=inf"]
    for flag in [*sizes, *odd, "--run.hang_after=1e308"]:
        refused("fit", *QUICK, flag, f"--run.dir={tmp_path / 'run'}", parts=[flag[2:].partition("=")[0]])


def test_a_number_without_end_costs_no_time(tmp_path, no_pictures):
    """Epochs were counted one by one before."""
    endless = [f"--{key}={10**12}" for key in ("epochs", "batch_size", "memory.micro_batch_size")]
    assert run(["fit", *QUICK, *endless, f"--run.hang_after={10**9}", f"--run.dir={tmp_path / 'run'}"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1


def test_epochs_that_are_cut_alike_are_counted_together():
    cuts = {0: 10, 3: 4, 7: 9}

    def windows(changes):
        size = lambda epoch: cuts[max(start for start in cuts if start <= epoch)]  # noqa: E731
        cut_at = lambda epoch: Cut(size(epoch), size(epoch), 1)  # noqa: E731
        return Windows(20, cut_at, iter, lambda batch: {}, seed=0, changes=changes)

    for epochs in (1, 3, 4, 7, 12):
        each, together = windows(None), windows([3, 7])
        total = count_steps(each, epochs, None)
        assert total == sum(each.steps(epoch) for epoch in range(epochs)) == count_steps(together, epochs, None)
        wanted = [epoch for epoch in range(epochs) for _ in range(each.steps(epoch))]
        for one in (each, together):
            of = partial(epoch_at, one, epochs)
            assert [of(step) for step in range(total)] == wanted
            assert of(total) == of(total + 5) == epochs - 1


@pytest.mark.slow
def test_counts_that_nobody_has_epochs_between_two_and_brackets_without_end_are_refused(refused):
    for flag, text in (("devices", "9" * 5000), ("nodes", "1000001"), ("devices", "٣")):
        refused("plan", "vit_digits", f"--{flag}={text}", parts=[f"--{flag}=", "from 1 to 1,000,000"])
    for text in ("{0.5: 3}", "{0: 3, 1e0: 2}"):
        refused("fit", "vit_digits", f"--accumulate={text}", parts=["accumulate=", "must be int|dict[int,int]|null"])
    refused("fit", "vit_digits", "--run.logger=" + "[" * 20_000, parts=["run.logger"])


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "\udcff", "b/" + "c" * 256])
def test_a_run_directory_that_cannot_be_made_is_refused(refused, tmp_path, name):
    refused("fit", *QUICK, f"--run.dir={tmp_path}/{name}", parts=["run.dir=", "choose another directory"])
    refused("run", "--restarts=0", "--", *QUICK, f"--run.dir={tmp_path}/{name}", parts=["run.dir=", "choose another"])
    refused("plan", *QUICK, "--gpu=cpu", f"--out={tmp_path}/{name}", parts=["--out=", "choose another directory"])


def test_a_class_whose_name_is_no_text_is_refused_before_training(refused, tmp_path):
    for part, name in itertools.product(("train", "test"), (b"good", b"b\xe4d")):
        folder = os.path.join(os.fsencode(tmp_path / "data" / part), name)
        os.makedirs(folder)
        Image.new("RGB", (8, 8)).save(os.path.join(os.fsdecode(folder), "0.png"))
    (tmp_path / "own.py").write_text(
        "from trainer import Recipe\nfrom trainer.data import ImageFolder\n"
        "from trainer.models import VisionTransformer\n"
        "model = VisionTransformer('custom', patch_size=4, layers=1, heads=1, width=8, mlp_width=8)\n"
        f"recipe = Recipe(model=model, data=ImageFolder({str(tmp_path / 'data')!r}, image_size=8), batch_size=2)\n"
    )
    refused("fit", tmp_path / "own.py", f"--run.dir={tmp_path / 'run'}", parts=[r"'b\udce4d'", "not UTF-8", "rename"])
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.parametrize("words", ["fit NAME.py", "fit NAME", "fit vit_digits --config NAME", "checkpoint verify NAME"])
def test_a_name_that_no_file_can_have_is_refused_in_a_line(words, capfd):
    assert run(words.replace("NAME", "n" * 5000).split()) in (1, 2)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("trainer: error: ")
    assert not is_checkpoint(Path("n" * 5000))
    assert CheckpointFolder(Path("n" * 5000)).newest_first() == []
    with pytest.raises(RecipeError, match=r"--text 'a\\udcff' is not UTF-8 text"):
        inputs([("text", "a\udcff")])


def digits(**changes):
    return load_recipe("vit_digits")[0].replace(**changes)


REFUSED = {
    "lr": lambda: Optim(lr="fast"),
    "clip_norm": lambda: Optim(clip_norm=True),
    "budget": lambda: Memory(budget=2),
    "logger": lambda: Run(logger=[1]),
    "every": lambda: Checkpoint(every=1.5),
    "workers": lambda: digits(data=Digits(workers=0.5)),
    "optim": lambda: digits(optim=None),
    "accumulate": lambda: digits(accumulate=2.5),
    "epochs": lambda: digits(epochs=10**16),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_setting_of_another_type_in_a_python_recipe_is_refused_by_name(key, golden):
    with golden.raises(RecipeError) as caught:
        REFUSED[key]()
    assert f"{key}=" in str(caught.value)


PREPARED = """
from trainer.data import Digits
from trainer.commands.recipes import load_recipe
class Own(Digits):
    def prepare(self, tokenizer=None):
        super().prepare(tokenizer)
        {line}
recipe = load_recipe("vit_digits")[0].replace(data=Own())
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("self.train = None", 2),
        ("self.test = []", 2),
        ("self.class_names = ['one']", 2),
        ("raise KeyError('mine')", 1),
        ("raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})", 1),
    ],
)
def test_a_dataset_that_prepares_nonsense_is_named_before_training(tmp_path, capfd, golden, line, code):
    (tmp_path / "own.py").write_text(PREPARED.format(line=line))
    assert run(["fit", str(tmp_path / "own.py"), *QUICK[1:], "--run.dir", str(tmp_path / "run")]) == code
    golden(next(line for line in capfd.readouterr().err.splitlines() if "error" in line))


def test_figures_that_cannot_be_drawn_do_not_end_a_run(tmp_path, capfd):
    lr = ["--optim.lr=1.7e308", "--optim.warmup_steps=0", "--optim.schedule=linear", "--max_steps=3"]
    assert run(["fit", *QUICK, *lr, "--run.dir", str(tmp_path / "run")]) == 0
    assert "metrics of this run cannot be plotted" in capfd.readouterr().err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
