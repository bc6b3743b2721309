"""No secret that is given to a run is in a file that it writes, nor in what it prints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import yaml
from cli.supervised import fork_processes
from PIL import Image

from trainer.cli import COMMANDS, run
from trainer.lab.measured_run import Trial
from trainer.system.processes import python_command
from trainer.system.redact import REDACTED

SECRETS = {
    "--data.url": "https://me:pa55w0rdInUrl@host/x?version=2&sig=sign4tureInUrl",
    "--data.token": "t0kenByItsName",
    "--model.url": "s3://me:s3cretOfTheModel@bucket/weights",
    "--data.root": "/data/hf_abcdefghijklmnopqrstuvwxyz0123",
}
HIDDEN = ("pa55w0rdInUrl", "sign4tureInUrl", "t0kenByItsName", "s3cretOfTheModel", "hf_abcdef", "0ther-wandb-key")
RECIPE = """
from dataclasses import dataclass

from trainer import Recipe, Run
from trainer.data import Digits
from trainer.errors import RecipeError
from trainer.models import MLP


@dataclass
class Remote(Digits):
    url: str = ""
    token: str | None = None
    root: str = ""

    def prepare(self, tokenizer=None):
        if "broken" in self.url:
            raise ValueError(f"{self.url} with token={self.token!r} is no address")
        if "absent" in self.url:
            raise RecipeError(f"data.url={self.url!r} with token={self.token!r} is not there: check the network")
        super().prepare(tokenizer)


@dataclass
class Stored(MLP):
    url: str = ""


recipe = Recipe(
    model=Stored([8]),
    data=Remote(),
    batch_size=64,
    max_steps=1,
    run=Run(logger=["tensorboard", "wandb"], evaluate=False),
)
"""
PLAIN = RECIPE.replace('["tensorboard", "wandb"]', '["csv"]')


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "0ther-wandb-key")
    path = tmp_path / "remote_recipe.py"
    path.write_text(RECIPE)
    return path


def command(*words, **secrets):
    """A command line with the secrets, as a process has it."""
    return [*map(str, words), *(word for pair in {**SECRETS, **secrets}.items() for word in pair)]


def shown(text):
    return [secret for secret in HIDDEN if secret in text]


def test_no_file_of_a_run_holds_a_secret(recipe_file, tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    run_dir = tmp_path / "run"
    words = command("fit", recipe_file, "--run.dir", run_dir)
    monkeypatch.setattr(sys, "argv", ["trainer", *words])  # which wandb would write
    assert run(words) == 0
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"recipe.yaml", "summary.json", "config.json", "metrics.csv"} <= names
    assert any("tfevents" in name for name in names)
    assert any(name.endswith(".wandb") for name in names)
    assert {path.name: found for path in files if (found := shown(path.read_bytes().decode("latin-1")))} == {}
    assert shown("".join(capfd.readouterr())) == []
    written = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    assert written["data"]["url"] == f"https://{REDACTED}@host/x?version=2&sig={REDACTED}"

    repeated = [
        "fit",
        str(run_dir / "recipe.yaml"),
        f"--run.dir={tmp_path / 'again'}",
        "--run.logger=csv",
        "--trust-recipe",
    ]
    assert run(repeated) == 2
    message = "trainer: error: model.url was written without its credentials: give it again as --model.url\n"
    assert capfd.readouterr().err == message
    assert run(["evaluate", str(run_dir), "--trust-recipe"]) == 2
    assert run([*repeated, *command()]) == 0


def test_a_printed_recipe_and_an_error_hold_no_secret(recipe_file, tmp_path, capsys):
    assert run([*command("fit", recipe_file), "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert shown(printed) == []
    (tmp_path / "own.yaml").write_text(printed)
    assert run(["fit", str(recipe_file), "--config", str(tmp_path / "own.yaml")]) == 2
    assert "was written without its credentials" in capsys.readouterr().err
    absent = {"--data.url": "https://me:pa55w0rdInUrl@host/absent?token=sign4tureInUrl"}
    assert run([*command("fit", recipe_file, **absent), "--run.logger=csv"]) == 2
    error = capsys.readouterr().err
    assert shown(error) == []
    assert f"data.url='https://{REDACTED}@host/absent?token={REDACTED}' with token='{REDACTED}' is not there" in error


def test_the_command_of_a_trial_holds_no_secret():
    trial = Trial("finished", None, command("python", "-m", "trainer", "fit"), 1.0)
    assert shown(str(trial.to_json())) == []
    assert trial.to_json()["command"].count(REDACTED) == 5


LINES = {
    "fit": ["fit", "RECIPE", "--run.dir=out/run"],
    "run": ["run", "--restarts=1", "--backoff=0", "--", "RECIPE", "--run.dir=out/run"],
    "doctor": ["doctor", "RECIPE"],
    "plan": ["plan", "RECIPE", "--gpu=cpu", "--out=out/plan"],
    "scale": ["plan", "RECIPE", "--gpu=a100-80gb", "--devices=1,2", "--out=out/scale"],
    "ladder": ["ladder", "RECIPE", "--steps=1", "--rungs=baseline", "--out=out/ladder"],
    "sweep": [
        "sweep",
        "RECIPE",
        "--over=optim.weight_decay=0,0.1",
        "--trials=1",
        "--run.evaluate=true",
        "--run.best=test_loss",
        "--out=out/sweep",
    ],
    "evaluate": ["evaluate", "run", "--trust-recipe"],
    "predict": ["predict", "run", "--trust-recipe", "--image=digit.png"],
    "export": ["export", "run", "--trust-recipe", "--to=hub", "--repo=me/model"],
    "runs": ["runs", "run", "--json"],
    "migrate": ["migrate", "training_args.json"],
    "checkpoint": ["checkpoint", "export", "run", "--trust-recipe", "--out=out/model"],
}
"""Every command with a line of its own, as it is given settings."""

ENDS = {"works": "", "is refused": "absent", "breaks": "broken"}
QUICK = {"fit": [*ENDS], "plan": ["works", "breaks"], "run": ["is refused"], "doctor": ["is refused"]}
QUICK |= {"scale": [], "ladder": [], "sweep": ["is refused"]}


def tried():
    for name in LINES:
        for end in ENDS:
            slow = end not in QUICK.get(name, ["works"])
            if (
                name not in ("checkpoint", "predict", "export", "runs", "migrate") or end == "works"
            ):  # these read no data
                yield pytest.param(name, end, marks=pytest.mark.slow if slow else ())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory whose recipe was given secrets."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "remote_recipe.py").write_text(PLAIN)
    assert run(command("fit", folder / "remote_recipe.py", "--run.dir", folder / "run", "--checkpoint.every=1")) == 0
    return folder / "run"


def test_every_command_is_among_those_tried_with_secrets():
    script_only = {"same-gradient"}  # reads no recipe, and drops what the scripts print
    assert {line[0] for line in LINES.values()} | script_only == COMMANDS.keys()


@pytest.mark.first(2)
@pytest.mark.parametrize(("name", "end"), tried())
def test_no_command_writes_or_prints_a_secret(request, recipe_file, tmp_path, monkeypatch, capfd, name, end):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    recipe_file.write_text(PLAIN)
    if name in ("evaluate", "predict", "checkpoint", "export", "runs"):
        shutil.copytree(request.getfixturevalue("trained"), "run")
        Image.new("L", (8, 8)).save("digit.png")
        monkeypatch.setattr(
            "trainer.after.export._to_hub", lambda folder, repo, public: f"{folder} is sent"
        )  # no network
        if name == "checkpoint":  # its model comes of recipe.yaml, which lacks what was secret
            kept = (tmp_path / "run" / "recipe.yaml").read_text().partition("# sha256 ")[0]
            (tmp_path / "run" / "recipe.yaml").write_text(kept.replace(REDACTED, "given"))
    if name == "migrate":
        keys = {"output_dir": SECRETS["--data.url"], "hub_token": HIDDEN[2], "hub_model_id": SECRETS["--data.root"]}
        keys |= {"push_to_hub": True, "model_name_or_path": SECRETS["--model.url"], "debug": SECRETS["--data.url"]}
        (tmp_path / "training_args.json").write_text(json.dumps(keys))
    if name in ("run", "ladder") and (name, end) != ("run", "is refused"):  # whose process imports nothing anyway
        fork_processes(monkeypatch)
    words = [str(recipe_file) if word == "RECIPE" else word for word in LINES[name]]
    url = f"https://me:pa55w0rdInUrl@host/{ENDS[end]}?token=sign4tureInUrl"
    given = (
        words
        if name in ("checkpoint", "runs", "migrate")
        else command(*words, **({"--data.url": url} if ENDS[end] else {}))
    )
    given += ["--max_steps=-1"] if (name, end) == ("run", "is refused") else []  # before anything is imported
    try:
        status = run(given)
    except ValueError as error:
        status = 1
        sys.excepthook(ValueError, error, error.__traceback__)
    assert (status == 0) == (end == "works" or name == "ladder"), capfd.readouterr()
    printed = "".join(capfd.readouterr())
    assert shown(printed) == []
    assert ENDS[end] == "" or name == "ladder" or f"https://{REDACTED}@host/{ENDS[end]}?token={REDACTED}" in printed
    files = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path not in (recipe_file, tmp_path / "training_args.json")
    ]
    assert {str(path): found for path in files if (found := shown(path.read_bytes().decode("latin-1")))} == {}


def test_an_error_that_nobody_expected_is_printed_without_secrets():
    code = """
from trainer import cli
from trainer.commands import checkpoint
def fail(argv):
    raise ValueError("https://me:pa55w0rdInUrl@host/x?token=sign4tureInUrl is no address")
checkpoint.checkpoint = fail
sys.argv = ["trainer", "checkpoint"]
cli.entry()
"""
    done = subprocess.run(python_command(code), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith(f"ValueError: https://{REDACTED}@host/x?token={REDACTED} is no address\n")
    assert shown(done.stderr + done.stdout) == []
