"""benchmarks/gpu.py with small models on the CPU: all of it but the GPU's own figures."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.benchmark import FOLDER, imported
from safetensors.numpy import load_file, save_file

from trainer.api import fit
from trainer.commands.recipes import load_recipe
from trainer.lab.measured_run import Trial
from trainer.memory.plan import decide_plan
from trainer.settings import change

gpu, gpu_faults, gpu_judge, gpu_rows = imported("gpu", "gpu_faults", "gpu_judge", "gpu_rows")
common, measured_run, planner_gpu = imported("common", "measured_run", "planner_gpu")
Measured, judge, read_found = gpu_judge.Measured, gpu_judge.judge, gpu_judge.read_found
PARTS, TINY, Row = gpu_rows.PARTS, gpu_rows.TINY, gpu_rows.Row

ROOT, VIT = FOLDER.parent, FOLDER / "recipes" / "vit_l_16.py"
BARE = ["jsonargparse", "docstring_parser", "typeshed_client", "datasets", "dill", "multiprocess", "torchao", "wandb"]
BARE += ["ray"]
"""Packages that a machine with torch and transformers may lack."""


def benchmark(*arguments: object, path: object = ROOT) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FOLDER / "gpu.py"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)


WITHOUT = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
without = lambda name, *rest: None if name.partition(".")[0] in {BARE} else find(name, *rest)
PathFinder.find_spec = staticmethod(without)
"""


def record_in(folder: Path) -> Any:
    return common.Record("gpu_exact", {}, folder)


def finished(*losses: float) -> Trial:
    return Trial("finished", None, [], 1.0, "a plan", len(losses), list(losses))


@pytest.mark.parametrize("command", [gpu, planner_gpu], ids=lambda module: module.__name__)
def test_without_a_gpu_there_is_nothing_to_measure(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "probe_gpu", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(tmp_path)])
    assert (command.main(["--out", str(tmp_path / "planner.json")]) if command is planner_gpu else command.main()) == 0
    assert "no CUDA device" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_rows_are_measured_without_the_packages_that_a_bare_machine_lacks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)  # Python starts with it
    asked = ("--device", "cpu", "--tiny", "--time", 10, "--only", "exact: optimizer")
    folders = ("--results", tmp_path / "results", "--work", tmp_path / "work")
    done = benchmark("exact", *asked, *folders, path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr  # the targets of a GPU's memory are not met here
    content = json.loads((tmp_path / "results" / "gpu_exact.json").read_text())
    assert content["complete"] is True
    assert content["command"].startswith("python benchmarks/gpu.py exact --device cpu")
    exact, reference = content["parts"]["exact"]
    assert (exact["status"], reference["status"]) == ("finished", "finished"), (exact["reason"], reference["reason"])
    assert exact["difference"]["reference"] == reference["name"] == "batch 64, 32-true"
    assert len(exact["difference"]["tensors"]) == 5
    assert exact["difference"]["wrong"] == []
    assert 0 < exact["difference"]["norm"] < 4e-3
    assert exact["failures"] == ["allocated memory was not measured"]
    assert exact["samples_per_second"] > 0
    assert exact["plan"].startswith("batch 64 = 1 rank × 64 micro-batches of 1")
    assert (exact["process_from"], exact["copied"]) == ("not known", None)
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["gpu_exact.json"]
    weights = [path for path in (tmp_path / "work").rglob("*.safetensors") if path.parent.name == "model"]
    assert weights == []


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [True, False])
def test_every_row_is_a_recipe_that_can_work(tiny, tmp_path):
    here = gpu.Benchmark("cpu", tiny, tmp_path, tmp_path)
    for row in [row for rows in PARTS.values() for row in rows]:
        recipe = common.resolve(here._arguments(row, row.steps))
        assert decide_plan(recipe, 1).world_size == 1, row.name
        assert recipe.max_steps == row.steps, row.name


@pytest.mark.slow
def test_a_killed_run_is_resumed_with_the_same_losses(tmp_path):
    done = benchmark("faults", "--device", "cpu", "--tiny", "--results", tmp_path)
    assert done.returncode == 0, done.stdout
    found = {row["name"]: row for row in json.loads((tmp_path / "gpu_faults.json").read_text())["rows"]}
    resumed = found["killed and resumed, weights streamed"]
    assert (resumed["met"], resumed["killed"], resumed["went_on_from"]) == (True, "killed", 4)
    assert found["out of memory, said so"]["reason"] == "needs a GPU"


WRONG = {"lader": "no part lader", "--device cpu": "use it with --tiny", "--only nothing": "no row has such a name"}
WRONG |= {"--time 0": "--time must be more than 0"}
WRONG_OF_PLANNER = {"--accelerator cpu": "use it with --tiny", "--minutes 0": "--minutes must be more than 0"}
WRONG_OF_PLANNER |= {"--only nothing": "no configuration has such a name", "--out a.txt": "a file that ends in .json"}


def test_a_wrong_command_line_is_refused(monkeypatch, capsys):
    for words, message in WRONG.items():
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words.split()])
        with pytest.raises(SystemExit, match="2"):
            gpu.main()
        assert message in capsys.readouterr().err
    for words, message in WRONG_OF_PLANNER.items():
        with pytest.raises(SystemExit, match="2"):
            planner_gpu.main(words.split())
        assert message in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- time and results


def test_headline_rows_come_first():
    limits = [(row.target, row.cap_gb) for row in PARTS["exact"][:2]]
    assert limits == [(("allocated", 0.70), None), (("allocated", 0.25), None)]
    for rows_of_part in PARTS.values():
        names = [row.name for row in rows_of_part]
        assert len(set(names)) == len(names)
        assert all(row.reference in (None, *names) for row in rows_of_part)


def test_what_is_said_of_language_models_is_what_was_predicted():
    page, found = (FOLDER / "README.md").read_text(), FOLDER / "results" / "gpu_lm_predicted.json"
    rows = json.loads(found.read_text())["rows"]
    assert [row["name"] for row in rows] == [row.name for row in PARTS["lm"]]
    for row in rows:
        assert f"| {row['name']} | {row['allocated']:.3f} | {row['reserved']:.3f} | {row['host']:.1f} |" in page


def test_a_part_ends_in_its_time_and_the_rest_are_rows_that_say_so(tmp_path, monkeypatch):
    clock = iter([0.0, 0.0, 60.0, 90.0, 97.0])
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setitem(gpu.PART_SECONDS, "exact", 100.0)
    given = []

    def measure(row: Row, seconds: float) -> Measured:
        given.append((row.name, seconds))
        return Measured(row, finished(1.0))

    four = [Row(str(number), "vit_l_16", seconds=70) for number in range(4)]
    found = gpu.run(measure, {"exact": four}, record_in(tmp_path))["exact"]
    assert given == [("0", 70), ("1", 40), ("2", 10)]
    assert [row["status"] for row in found] == ["finished"] * 3 + ["not run"]
    assert found[3]["reason"] == "late: the 100 s of this part are used up"


def test_what_was_measured_is_on_disk_when_the_benchmark_is_ended(tmp_path):
    def measure(row: Row, seconds: float) -> Measured:
        if row.name == "third":
            raise KeyboardInterrupt
        return Measured(row, finished(2.0))

    with pytest.raises(KeyboardInterrupt):
        gpu.run(
            measure, {"exact": [Row(name, "vit_l_16") for name in ("first", "second", "third")]}, record_in(tmp_path)
        )
    content = json.loads((tmp_path / "gpu_exact.json").read_text())
    assert content["complete"] is False
    assert [(row["name"], row["losses"]) for row in content["parts"]["exact"]] == [("first", [2.0]), ("second", [2.0])]


def test_a_missing_package_fails_its_own_row_only(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    here = gpu.Benchmark("cpu", True, tmp_path, tmp_path)
    text = here.measure(PARTS["text"][0], 1.0)
    assert text.trial.status == "failed"
    assert "tokenizers" in str(text.trial.reason)
    under_a_cap = here.measure(next(row for row in PARTS["caps"] if row.cap_gb), 1.0)
    assert (under_a_cap.trial.status, under_a_cap.trial.reason) == ("not run", "needs a GPU")


def test_a_late_row_keeps_what_it_measured():
    row = PARTS["exact"][1]
    late = Trial("too slow", "not finished after 150 s", [], 150.0, losses=[2.3])
    found = {"precision": "bf16-mixed", "batch_size": 64, "step_seconds": [40.0], "grad_norm": 1.5, "process_gb": 1.0}
    result = judge(Measured(row, late, found), [], {})
    assert (result["step_seconds"], result["grad_norm"], result["process_gb"]) == (40.0, 1.5, 1.0)
    assert (result["met"], result["failures"]) == (False, ["late: not finished after 150 s"])


def test_a_row_that_would_be_late_ends_with_what_it_has(tmp_path):
    out, settings = tmp_path / "out.json", {**TINY["vit_l_16"], "run.dir": tmp_path / "run", "run.accelerator": "cpu"}
    flags = [f"--{key}={value}" for key, value in {**settings, "batch_size": 8, "memory.micro_batch_size": 8}.items()]
    assert measured_run.main([f"--out={out}", "--until=1000", "fit", str(VIT), "--run.evaluate=false", *flags]) == 0
    found, summary = read_found(out), json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (found["cut_at"], summary["status"], len(found["grad_norms"]) > 20) == (1, "interrupted", True)
    assert not (tmp_path / "run" / "checkpoints").exists()
    result = judge(Measured(PARTS["exact"][2], finished(2.3), found), [], {})
    assert result["status"] == "late"
    later = judge(Measured(PARTS["exact"][2], finished(2.3), {**found, "cut_at": 2}), [], {})
    assert (later["status"], later["cut_at"]) == ("finished", 2)


def test_speed_is_the_median_of_the_last_twenty_steps_without_the_one_under_the_profiler():
    times = [9.0] * 10 + [0.2] * 19 + [5.0] + [7.0]
    found = {"precision": "bf16-mixed", "batch_size": 256, "step_seconds": times, "profiled": 30}
    found |= {"flops_per_sample": 370e9}
    result = judge(Measured(Row("fast", "vit_l_16"), finished(2.0), found), [], {"bfloat16": 989.4e12})
    assert (result["step_seconds"], result["steps_timed"]) == (0.2, 20)
    assert result["samples_per_second"] == pytest.approx(1280)
    assert result["mfu"] == pytest.approx(1280 * 370e9 / 989.4e12)


def test_a_fault_that_breaks_is_a_row(tmp_path):
    faults = gpu_faults.Faults("cpu", True, tmp_path, end=float("inf"))
    needs_gpu = next(task for task in gpu_faults.tasks(faults) if task.name == "out of memory, said so")
    broken = gpu_faults.Task("broken", 9, lambda seconds: 1 / 0)
    found = gpu_faults.measure([(1, [broken, needs_gpu])], record_in(tmp_path), faults.end, False)
    assert [(row["status"], row["met"]) for row in found] == [("failed", False), ("not run", None)]
    assert json.loads((tmp_path / "gpu_exact.json").read_text())["rows"][0]["reason"].startswith("ZeroDivisionError")


# -------------------------------------------------------------------------------------------------------- the gradient


def trained(folder: Path, name: str, model: type | None = None, **settings: object) -> Measured:
    """Two steps of a tiny ViT in this process, as a row would measure them."""
    recipe, source = load_recipe(str(VIT))
    small = {"batch_size": 16, "max_steps": 2, "run.dir": str(folder / name), "run.accelerator": "cpu"}
    quiet = dict.fromkeys(("run.evaluate", "run.predict", "run.progress"), False)
    asked = {f"memory.{key}": value for key, value in settings.items()}
    recipe = change(recipe, {**TINY["vit_l_16"], **small, **quiet, "run.devices": 1, **asked})
    if model is not None:
        fields = {field.name: getattr(recipe.model, field.name) for field in dataclasses.fields(recipe.model)}
        recipe = recipe.replace(model=model(**fields))
    out = folder / f"{name}.json"
    with measured_run.Meter(out) as meter:
        meter.write(batch_size=recipe.batch_size, precision=recipe.memory.precision)
        summary = fit(recipe, source)
    with open(folder / name / "metrics.csv") as file:
        header, *lines = file.read().split()
    losses = [float(line.split(",")[header.split(",").index("loss")]) for line in lines]
    trial = Trial(summary.status, None, [], 1.0, losses=losses)
    return Measured(
        Row(name, "vit_l_16", reference="plain"), trial, read_found(out), measured_run.gradients_beside(out)
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"), "plain", micro_batch_size=16)


def faulty(fault: str) -> type:
    """The benchmark's model with the right losses, whose gradients are 1 % too long, or lack one micro-batch."""
    recipe, _ = load_recipe(str(VIT))

    class Faulty(type(recipe.model)):
        seen = 0

        def losses(self, module, batch):
            for loss in super().losses(module, batch):
                type(self).seen += batch["labels"].numel() == 1 and loss.total.requires_grad
                share = 1.01 if fault == "too long" else 0 if type(self).seen == 5 else 1
                yield dataclasses.replace(loss, total=share * loss.total + (1 - share) * loss.total.detach())

    return Faulty


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": 3},
        {"micro_batch_size": 1, "precision": "bf16-mixed", "activation_checkpointing": "full"},
        {"micro_batch_size": 4, "cpu_offload": "optimizer"},
    ],
    ids=lambda settings: " ".join(f"{key}={value}" for key, value in settings.items()),
)
def test_a_right_gradient_passes(settings, plain, tmp_path):
    row = judge(trained(tmp_path, "row", **settings), [plain], {})
    assert (row["met"], row["failures"]) == (True, [])
    assert set(row["difference"]["tensors"]) >= {"heads.head.weight", "class_token"}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("fault", "precision"), [("too long", "bf16-mixed"), ("one left out", "32-true"), ("one left out", "bf16-mixed")]
)
def test_a_wrong_gradient_fails_the_row_though_the_losses_are_right(fault, precision, plain, tmp_path):
    row = judge(trained(tmp_path, "row", faulty(fault), micro_batch_size=1, precision=precision), [plain], {})
    assert row["difference"]["loss"] < 1e-2
    assert row["met"] is False
    assert any("the gradient's norm" in said for said in row["failures"])


def test_one_wrong_weight_of_all_fails_the_row(plain, tmp_path):
    norms = dict(plain.found["grad_norms"])
    norms["encoder.layers.encoder_layer_1.mlp.3.bias"] *= 1.1
    row = judge(Measured(plain.row, plain.trial, {**plain.found, "grad_norms": norms}, plain.gradients), [plain], {})
    assert "the norm of the gradient of encoder.layers.encoder_layer_1.mlp.3.bias" in row["failures"][0]
    turned = load_file(plain.gradients)
    turned["class_token"] = turned["class_token"][..., ::-1].copy()  # as long as before
    save_file(turned, tmp_path / "turned.safetensors")
    row = judge(dataclasses.replace(plain, gradients=tmp_path / "turned.safetensors"), [plain], {})
    assert "the gradient of class_token differs" in row["failures"][0]


def test_a_row_without_gradients_is_not_taken_for_right(plain):
    without = dataclasses.replace(plain, found={"precision": "32-true", "batch_size": 16, "gradient_problem": "why"})
    row = judge(without, [plain], {})
    assert (row["met"], row["failures"]) == (False, ["gradients were not compared: why"])
    assert judge(plain, [], {})["met"] is None  # before its reference is there


# ------------------------------------------------------------------------------------------------------------- figures


def test_copies_over_the_bus_are_counted_in_the_trace():
    copies = {"HtoD (Pinned -> Device)": 100, "HtoD (Pageable -> Device)": 5, "DtoH (Device -> Pinned)": 30}
    copies["DtoD (Device -> Device)"] = 1000
    events = [
        {"ph": "X", "cat": "gpu_memcpy", "name": f"Memcpy {name}", "args": {"bytes": size}}
        for name, size in copies.items()
    ]
    events.append({"ph": "X", "cat": "kernel", "name": "gemm", "args": {}})
    assert measured_run.copied({"traceEvents": events}) == {"to_device": 105, "to_host": 30}
    assert measured_run.copied({"traceEvents": [{"cat": "cpu_op", "name": "aten::add"}]}) is None


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ("123, 1000\n77, 5\n", 5),
        ("123, 1000\n", 1000),  # a container that numbers its processes otherwise
        ("123, 1000\n124, 5\n", None),
        ("77, [N/A]\n", None),
        ("", None),
    ],
)
def test_memory_of_this_process_is_told_from_that_of_others(said, size):
    assert measured_run.of_process(said, 77) == (size and size * 2**20)


def test_operations_of_a_sample_are_those_of_the_published_model():
    recipe, _ = load_recipe(str(VIT))
    recipe.data.prepare()
    assert measured_run.flops_per_sample(recipe) == pytest.approx(
        3 * 2 * 61.6e9, rel=0.01
    )  # a product and a sum are two
