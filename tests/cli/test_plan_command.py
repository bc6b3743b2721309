"""``trainer plan`` from its command line to its files, for one number of devices and for several."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import shlex
import subprocess
import sys
import zlib
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.page import embedded

from trainer import PlanReport, plan
from trainer.cli import run
from trainer.commands.plan import SWITCHES, VALUED_FLAGS, command_for_plan
from trainer.commands.recipes import load_recipe
from trainer.fakegpu.gpus import GPUS
from trainer.planner.report import Candidate
from trainer.report import plots
from trainer.system.text import format_bytes

A100 = ("--gpu", "a100-80gb")
FEW = ("--memory.activation_checkpointing", "full", "--memory.cpu_offload", "optimizer")
"""Two combinations are left: with and without offloaded activations."""

ONE = (*FEW, "--memory.activation_offload", "true")
SMALL = ("--batch_size", "4", "--memory.micro_batch_size", "4")
"""One micro-step to trace."""
VIT = ("plan", "vit_digits", "--model.layers=1", *A100)
WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":16:8")
HYBRID = ("--memory.strategy", "fsdp", "--memory.replicas", "2")
"""One strategy is left to simulate."""


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of matrix products would be most of what a tiny model needs, and differs between versions of torch.

    Not once for all tests: what a test has set in the environment is gone after it.
    """
    monkeypatch.setenv(*WORKSPACE)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str, Path]:
    """Exit code, standard output, standard error and folder of ``trainer plan`` that finds something."""
    folder, out, err = tmp_path_factory.mktemp("plan") / "out", StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setenv(*WORKSPACE)
        code = run([*VIT, "--memory.budget", "30MB", *FEW, "--seed=3", "--all", "--page", "--out", str(folder)])
    return code, out.getvalue(), err.getvalue(), folder


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 20_000


def test_a_plan_is_printed_with_its_reasons_and_written(planned):
    code, out, err, folder = planned
    assert code == 0, err
    parts = [
        "model    VisionTransformer: 54,282 parameters",
        "batch    64 samples per step, 32-true",
        "budget   30 MB on each device for torch",
        "outside  in addition, about 500 MB for the CUDA context",
        "micro-batch  strategy  checkpointing",
        "yes  chosen",
        "- tried: 2 of 2 combinations of knobs: 2 plans, 2 traced; 2 fit",
        "- note: faster than ",
        "--memory.compile blocks (",
        "the chosen plan:\ntrainer fit vit_digits",
        f"files: {folder}: plan.json, plan.html, fit.html",
    ]
    places = [out.find(part) for part in parts]
    assert -1 not in places, (parts[places.index(-1)], out)
    assert places == sorted(places)
    assert max(map(len, out.split("files:")[0].splitlines())) <= 120
    assert err.splitlines()[0].startswith("1/")
    content = json.loads((folder / "plan.json").read_text())
    assert content["chosen"]["fits"] is True
    assert len(content["candidates"]) == 2
    assert content["parameters"] == 54_282
    page = (folder / "plan.html").read_text()
    assert embedded(page, "plan") == content
    curve = embedded(page, "timeline")
    assert set(curve["allocated"]) == set(curve["categories"])
    assert len(curve["reserved"]) == len(curve["allocated"]["params"]) > 100
    assert round(max(curve["reserved"]) / 1e9, 3) == content["chosen"]["predicted_reserved_gb"]


def test_the_pasted_command_is_that_plan(planned, capsys):
    _, out, _, folder = planned
    pasted = out.split("the chosen plan:\n")[1].split("\n\n")[0].replace("\\\n", "")
    words = shlex.split(pasted)
    content = json.loads((folder / "plan.json").read_text())
    assert words == shlex.split(content["command"])
    assert words[:3] == ["trainer", "fit", "vit_digits"]
    assert run([*words[1:], "--print_config"]) == 0
    printed = capsys.readouterr().out
    for line in ("seed: 3", "  budget: 30MB", "  cpu_offload: optimizer", "  micro_batch_size: 16", "  devices: 1"):
        assert line in printed.splitlines(), printed
    assert "activation_offload: false" in printed


def test_a_page_replays_the_traced_plans(planned):
    _, _, _, folder = planned
    page = (folder / "fit.html").read_text()
    (model,) = embedded(page, "facts")["models"]
    assert (model["name"], model["batch"]) == ("vit_digits", 64)
    assert model["command"].startswith("trainer fit vit_digits --")
    assert "--seed 3" in model["command"]
    (packed,) = re.findall(r'fit\.add\("vit_digits", "([^"]*)"\)', page)
    plans = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert sorted(one["flags"].get("memory.activation_offload", False) for one in plans) == [False, True]
    assert all(one["blocks"] and one["sizes"] == [16] for one in plans)


def test_a_page_is_for_one_gpu(tmp_path, capsys):
    assert run([*VIT, "--page", "--devices", "1,2", "--out", str(tmp_path)]) == 2
    assert "--page is for a search with one number of devices" in capsys.readouterr().err
    assert run([*VIT, "--page", "--devices", "2", "--out", str(tmp_path)]) == 2
    assert "--page shows a run on one GPU: give --gpu and --devices 1" in capsys.readouterr().err


@pytest.mark.slow
def test_json_is_all_that_is_on_stdout_and_what_is_in_the_file(tmp_path, capfd):
    argv = [*VIT, "--memory.budget", "1MB", *ONE, *SMALL, "--json", "--out", str(tmp_path)]
    assert run(argv) == 1
    out, err = capfd.readouterr()
    content = json.loads(out)
    assert content == json.loads((tmp_path / "plan.json").read_text())
    assert (content["chosen"], content["command"]) == (None, None)
    assert not any(one["fits"] for one in content["candidates"])
    assert embedded((tmp_path / "plan.html").read_text(), "plan") == content
    (error,) = [line for line in err.splitlines() if line.startswith("trainer: error: ")]
    smallest = min(one["predicted_reserved_gb"] for one in content["candidates"])
    assert 0.005 < smallest < 0.05
    assert error.startswith(
        f"trainer: error: no plan fits in 1.0 MB: the smallest needs {format_bytes(smallest * 1e9)}"
    ), error


@pytest.mark.slow
def test_a_table_is_printed_and_written(tmp_path, capfd):
    argv = [*VIT, *HYBRID, "--devices", "16,128", "--interconnect", "100gbe", "--json"]
    assert run([*argv, "--out", str(tmp_path)]) == 0
    out, err = capfd.readouterr()
    content = json.loads(out)
    assert content == json.loads((tmp_path / "scale.json").read_text())
    one, sixteen, many = content["rows"]
    assert (one["devices"], one["strategy"], one["fits"]) == (1, "single", True)
    assert (sixteen["devices"], sixteen["nodes"], sixteen["strategy"]) == (16, 2, "hsdp")
    assert sixteen["over"]["100gbe"]["efficiency"] < 1
    assert sixteen["leaving_a_node_gb"] > 0
    assert (many["devices"], many["fits"]) == (128, False)
    assert "give --batch_size 128 or more" in many["reason"]
    parts = ["1/2 · single on 1", "batch    64 samples", "100gbe", "devices  nodes  strategy", "- over 100gbe: hsdp"]
    places = [err.find(part) for part in [*parts, "- not simulated: 128 devices", "- assumed:", "files: "]]
    assert -1 not in places, err
    assert places == sorted(places)
    assert max(map(len, err.split("files:")[0].splitlines())) <= 120
    assert run([*argv, "--out", str(tmp_path)]) == 2  # which holds a table already
    assert f"--out={tmp_path} already holds a scale" in capfd.readouterr().err


@pytest.mark.slow
def test_a_network_is_given_to_a_search_and_takes_as_long_as_in_a_table(tmp_path, capfd):
    """One of everything is a search, several of anything a table: here of the same 16 devices on 2 nodes."""
    argv = [*VIT, *HYBRID, *ONE, *SMALL, "--batch_size=16", "--memory.micro_batch_size=1", "--json"]
    # What a search may turn, and a table leaves as it is.
    argv += ["--memory.optimizer_in_backward=false", "--memory.reshard_after_forward=false"]
    found = []
    for name, flags in (("search", ["--interconnect", "10gbe"]), ("table", ["--interconnect", "10gbe,100gbe"])):
        assert run([*argv, "--devices", "16", "--nodes", "2", *flags, "--out", str(tmp_path / name)]) == 0
        out, err = capfd.readouterr()
        found.append(json.loads(out))
        if name == "search":
            assert "network  10gbe: 10 Gbit/s Ethernet" in err
            assert "times    estimates, ± " in err
            assert "the chosen plan, over 10gbe:\ntorchrun --nnodes 2" in err
    search, table = found
    assert search["interconnect"] == "10gbe"
    assert search["chosen"]["prediction"]["step_ms"] == pytest.approx(
        table["rows"][-1]["over"]["10gbe"]["step_ms"], abs=1e-3
    )
    slow, fast = (table["rows"][-1]["over"][name] for name in ("10gbe", "100gbe"))
    assert fast["communication_ms"] < slow["communication_ms"]
    assert fast["step_ms"] <= slow["step_ms"]  # equal where all communication is hidden behind the backward pass


def test_a_table_without_a_row_that_fits_ends_with_1(tmp_path, capfd):
    argv = [*VIT, "--interconnect", "100gbe,ib-hdr", "--memory.budget", "1MB"]
    assert run([*argv, "--out", str(tmp_path)]) == 1
    out, err = capfd.readouterr()
    assert "single does not fit" in out
    assert "trainer: error: nothing fits on any of these numbers of devices" in err


def test_flags_that_cannot_work_are_refused_without_torch():
    """In an interpreter that has none."""
    wrong = [["--gpu", "a100-80g"], [*A100, "--interconnect", "bogus"], [*A100, "--devices", "3", "--nodes", "2"]]
    wrong += [["--gpu", "cpu", "--devices", "8,12"], [*A100, "--lossy", "maybe"], ["--interconnect", "bogus"]]
    code = "import sys; sys.modules['torch'] = None; from trainer.cli import run\n"
    code += f"print([run(['plan', 'vit_digits', *flags]) for flags in {wrong}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [2] * len(wrong), done.stderr
    named = [line.removeprefix("trainer: error: --").partition("=")[0] for line in done.stderr.splitlines()]
    assert named == ["gpu", "interconnect", "devices", "devices", "lossy", "interconnect"], done.stderr


@pytest.mark.slow
def test_the_planner_imports_fabric_alone_and_the_rest_of_lightning_is_there_when_it_is_wanted():
    code = """
import gc, sys
from trainer.system.imports import quick_imports
with quick_imports():
    import trainer.planner.search
assert gc.isenabled()
heavy = {"pytorch_lightning", "torchmetrics", "transformers", "torchvision", "scipy", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
from lightning_fabric import Fabric as ours
import lightning, pytorch_lightning, torchmetrics
from pytorch_lightning import LightningModule, Trainer
from torchmetrics.classification import MulticlassAccuracy
assert ours is trainer.planner.traced_run.Fabric and pytorch_lightning.Trainer is Trainer
assert torchmetrics.Accuracy(task="binary") is not None and lightning.__version__[0] == "2"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_must_be_named(capsys):
    assert run(["plan", "vit_digits"]) == 2
    message = capsys.readouterr().err
    assert [part for part in ("--gpu: ", "a100-80gb", "h200") if part not in message] == []


def test_a_launcher_is_refused(monkeypatch, golden, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert run(["plan", "vit_digits", *A100]) == 2
    golden(capsys.readouterr().err)


def test_help_lists_the_planners_flags_and_the_recipes(capsys):
    assert run(["plan", "vit_digits", "--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"--{name} " in page for name in (*VALUED_FLAGS, *SWITCHES, "optim.lr", "memory.budget"))


@pytest.mark.slow
def test_a_folder_with_a_configuration_is_enough_for_a_text_model(tmp_path, sample_data, capsys):
    """No weights: neither of them are there, nor is a hub asked."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "distilbert", "n_layers": 1, "dim": 16, "hidden_dim": 32, "n_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    argv = ["plan", "distilbert_imdb", *A100, "--out", str(tmp_path / "out"), *ONE, *SMALL, "--memory.budget", "1GB"]
    argv += ["--model.name", str(folder), "--model.weights", "null"]
    argv += ["--data.root", str(sample_data / "imdb_folder"), "--data.cache_dir", str(tmp_path / "cache")]
    assert run(argv) == 2
    assert f"model.tokenizer='{folder}' has no vocabulary" in capsys.readouterr().err
    tokenizer = str(sample_data / "tokenizers" / "bert-base-uncased")
    assert run([*argv, "--model.tokenizer", tokenizer]) == 0
    content = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert 400_000 < content["parameters"] < 600_000  # 30,522 words of 16 numbers, and little else
    assert content["chosen"]["fits"] is True


def test_a_hub_that_is_not_there_is_said_with_what_is_needed(tmp_path, monkeypatch, golden, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))  # no reviews, so no tokenizer is needed
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    argv = ["plan", "distilbert_imdb", *A100, "--model.weights", "nobody/absent", "--model.name", "nobody/absent"]
    assert run(argv) == 2
    golden(capsys.readouterr().err.splitlines()[-1])


def test_flags_that_were_given_stay_unless_the_plan_has_decided_them(golden):
    recipe = load_recipe("vit_digits")[0]
    passed = [("memory.micro_batch_size", "auto"), ("run.dir", "a folder"), ("run.devices", "4"), ("epochs", "1")]
    passed += [("data.url", "https://me:pass@host/x"), ("data.token", "abc")]
    chosen = Candidate({"memory.micro_batch_size": 8, "memory.activation_offload": True}, "", 1, 1, 1, 1.0, True)
    report = PlanReport(recipe, "A100", 8, 2, 1, 0.03, 0, chosen, [chosen])
    golden("\n".join(command_for_plan("my recipe.py", passed, recipe, report)))


def test_a_picture_is_drawn_wherever_the_budget_lies_and_keeps_a_long_title(tmp_path, monkeypatch):
    titles, original = [], plots._new_figure

    def remembered(title: str, height: float) -> Any:
        titles.append(title)
        return original(title, height)

    monkeypatch.setattr(plots, "_new_figure", remembered)
    timeline = {
        "allocated": {"params": [0, 5e8, 5e8, 5e8], "activations": [0, 0, 4e8, 0], "batch": [0, 0, 1e6, 0]},
        "reserved": [0, 6e8, 1.1e9, 1.1e9],
        "marks": [[0, "init"], [1, "forward"], [2, "backward"], [3, "saving"]],
    }
    for budget in (0.5e9, 80e9):
        plots.plot_plan(timeline, budget, "name\n" + "a technique, " * 20, tmp_path / "plan.png")
        assert is_png(tmp_path / "plan.png")
    assert titles[0].startswith("name\na technique")
    assert max(map(len, titles[0].splitlines())) <= 95


@pytest.mark.slow
def test_from_python_a_budget_may_be_an_argument():
    recipe = load_recipe("vit_digits")[0]
    fixed = {"activation_checkpointing": "full", "cpu_offload": "optimizer", "activation_offload": True}
    thin = dataclasses.replace(recipe.model, layers=1)
    recipe = recipe.replace(model=thin, memory=dataclasses.replace(recipe.memory, **fixed), batch_size=4)
    told: list[tuple[int, int]] = []
    report = plan(recipe, gpu="rtx-4090", budget="50%", progress=lambda done, total, text: told.append((done, total)))
    assert isinstance(report, PlanReport)
    assert report.budget == int(0.5 * GPUS["rtx-4090"].memory)
    assert report.chosen.flags == {}
    assert told[-1][0] == told[-1][1]


UNTRACEABLE = """
import torch
from trainer import Optim, Recipe
from trainer.data import Digits
from trainer.models import VisionTransformer


@torch.library.custom_op("odd::twice", mutates_args=())
def twice(labels: torch.Tensor) -> torch.Tensor:
    return labels * 2


class Odd(VisionTransformer):
    def losses(self, module, batch):
        twice(batch["labels"])
        yield from super().losses(module, batch)


small = {"image_size": 8, "patch_size": 4, "layers": 1, "heads": 2, "width": 8, "mlp_width": 8}
recipe = Recipe(model=Odd("custom", **small), data=Digits(), optim=Optim("sgd", lr=0.1), batch_size=4)
"""


def test_a_model_that_cannot_be_traced_is_an_error_with_its_line_and_no_traceback(tmp_path, capfd):
    file = tmp_path / "odd.py"
    file.write_text(UNTRACEABLE)
    assert run(["plan", str(file), *A100, "--out", str(tmp_path / "out")]) == 1
    first, *others = capfd.readouterr().err.split("trainer: error: ")[1].splitlines()
    assert first.startswith("the model cannot be traced, and no other plan was tried: ")
    assert f"{file}:15" in first
    assert others == []
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["chosen"] is None
