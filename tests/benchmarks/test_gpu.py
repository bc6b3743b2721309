"""benchmarks/gpu.py with small models on the CPU: all of it but the GPU's own figures."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.warm import python
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
from common import Record  # noqa: E402
from gpu_faults import Faults, rows  # noqa: E402
from gpu_faults import measure as measure_faults  # noqa: E402
from gpu_judge import Measured, judge, read_found  # noqa: E402
from gpu_rows import PARTS, TINY, Row  # noqa: E402

from trainer.commands.measured_run import Trial  # noqa: E402
from trainer.commands.recipes import load_recipe  # noqa: E402
from trainer.fit import fit  # noqa: E402
from trainer.settings import change  # noqa: E402

VIT = ROOT / "benchmarks" / "recipes" / "vit_l_16.py"
BARE = (
    "jsonargparse",
    "docstring_parser",
    "typeshed_client",
    "datasets",
    "dill",
    "multiprocess",
    "torchao",
    "wandb",
    "ray",
)
"""Packages that a machine with torch and transformers may lack."""


def benchmark(*arguments: object, path: Path | None = None, timeout: float = 280) -> subprocess.CompletedProcess:
    folders = os.pathsep.join(map(str, filter(None, [path, ROOT])))
    environment = {**os.environ, "PYTHONPATH": folders, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    program = str(ROOT / "benchmarks" / "gpu.py")
    if path is None:
        return python(program, *arguments, env=environment, timeout=timeout)
    return subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


WITHOUT = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
without = lambda name, *rest: None if name.partition(".")[0] in {BARE} else find(name, *rest)
PathFinder.find_spec = staticmethod(without)
"""


@pytest.fixture
def bare_machine(tmp_path):
    """A folder that Python starts with when it is on the path, in which no such package is found any more."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT)
    return folder


def finished(*losses: float) -> Trial:
    return Trial("finished", None, [], 1.0, "a plan", len(losses), list(losses))


def test_without_a_gpu_there_is_nothing_to_measure(tmp_path):
    done = benchmark("--results", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no CUDA device" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_rows_are_measured_without_the_packages_that_a_bare_machine_lacks(tmp_path, bare_machine):
    only = "exact: optimizer"
    done = benchmark(
        *("first", "--device", "cpu", "--tiny", "--time", 10, "--only", only),
        *("--results", tmp_path / "results", "--work", tmp_path / "work"),
        path=bare_machine,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # the targets of a GPU's memory are not met here
    content = json.loads((tmp_path / "results" / "gpu_first.json").read_text())
    assert content["complete"] is True
    assert content["command"].startswith("python benchmarks/gpu.py first --device cpu")
    exact, reference = content["parts"]["first"]
    assert (exact["status"], reference["status"]) == ("finished", "finished"), (exact["reason"], reference["reason"])
    assert exact["difference"]["reference"] == reference["name"] == "batch 64, 32-true"
    assert len(exact["difference"]["tensors"]) == 5
    assert exact["difference"]["wrong"] == []
    assert 0 < exact["difference"]["norm"] < 4e-3
    assert exact["failures"] == ["allocated memory was not measured"]
    assert exact["samples_per_second"] > 0
    assert exact["plan"].startswith("batch 64 = 1 rank × 64 micro-batches of 1")
    assert (exact["process_from"], exact["copied"]) == ("not known", None)
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["gpu_first.json"]
    weights = [path for path in (tmp_path / "work").rglob("*.safetensors") if path.parent.name == "model"]
    assert weights == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_row_of_the_first_call_runs(tmp_path, bare_machine):
    arguments = ("first", "--device", "cpu", "--tiny", "--time", 10, "--results", tmp_path / "results")
    done = benchmark(*arguments, path=bare_machine, timeout=1700)
    found = json.loads((tmp_path / "results" / "gpu_first.json").read_text())["parts"]["first"]
    assert [row["name"] for row in found] == [row.name for row in PARTS["first"]]
    for row in found:
        assert row["status"] == ("not run" if row["cap_gb"] else "finished"), row["reason"]
        assert row["difference"] is None or row["difference"]["wrong"] == []
    assert all(row["flops_per_sample"] > 0 for row in found if row["name"].startswith("speed"))
    assert "| fp32: parameters streamed, of 8" in done.stdout


@pytest.mark.slow
def test_a_killed_run_is_resumed_with_the_same_losses(tmp_path):
    done = benchmark("faults", "--device", "cpu", "--tiny", "--results", tmp_path)
    assert done.returncode == 0, done.stdout
    found = {row["name"]: row for row in json.loads((tmp_path / "gpu_faults.json").read_text())["rows"]}
    resumed = found["killed and resumed, weights streamed"]
    assert (resumed["met"], resumed["killed"], resumed["went_on_from"]) == (True, "killed", 4)
    assert found["out of memory, said so"]["reason"] == "needs a GPU"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lader"], "no part lader"),
        (["--device", "cpu"], "use it with --tiny"),
        (["--only", "nothing"], "no row has such a name"),
        (["--time", "0"], "--time must be more than 0"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- time and results


def test_headline_rows_come_first():
    limits = [(row.target, row.cap_gb) for row in PARTS["first"][:2]]
    assert limits == [(("allocated", 0.70), None), (("allocated", 0.25), None)]
    for rows_of_part in PARTS.values():
        names = [row.name for row in rows_of_part]
        assert len(set(names)) == len(names)
        assert all(row.reference in (None, *names) for row in rows_of_part)


def test_a_part_ends_in_its_time_and_the_rest_are_rows_that_say_so(tmp_path, monkeypatch):
    clock = iter([0.0, 0.0, 60.0, 90.0, 97.0])
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setitem(gpu.PART_SECONDS, "first", 100.0)
    given = []

    def measure(row: Row, seconds: float) -> Measured:
        given.append((row.name, seconds))
        return Measured(row, finished(1.0))

    four = [Row(str(number), "vit_l_16", seconds=70) for number in range(4)]
    found = gpu.run(measure, {"first": four}, Record("gpu_first", {}, tmp_path))["first"]
    assert given == [("0", 70), ("1", 40), ("2", 10)]
    assert [row["status"] for row in found] == ["finished"] * 3 + ["not run"]
    assert found[3]["reason"] == "late: the 100 s of this part are used up"


def test_what_was_measured_is_on_disk_when_the_benchmark_is_killed(tmp_path):
    script = f"""
import os, signal, sys
sys.path[:0] = [{str(ROOT / "benchmarks")!r}, {str(ROOT)!r}]
import gpu
from pathlib import Path
def measure(row, seconds):
    if row.name == "third":
        os.kill(os.getpid(), signal.SIGKILL)
    return gpu.Measured(row, gpu.Trial("finished", None, [], 1.0, losses=[2.0]))
rows = [gpu.Row(name, "vit_l_16") for name in ("first", "second", "third")]
gpu.run(measure, {{"first": rows}}, gpu.Record("gpu_first", {{}}, Path({str(tmp_path)!r})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    content = json.loads((tmp_path / "gpu_first.json").read_text())
    assert content["complete"] is False
    assert [(row["name"], row["losses"]) for row in content["parts"]["first"]] == [("first", [2.0]), ("second", [2.0])]


def test_a_missing_package_fails_its_own_row_only(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    here = gpu.Benchmark("cpu", True, tmp_path, tmp_path)
    text = here.measure(PARTS["text"][0], 1.0)
    assert text.trial.status == "failed"
    assert "tokenizers" in str(text.trial.reason)
    under_a_cap = here.measure(next(row for row in PARTS["caps"] if row.cap_gb), 1.0)
    assert (under_a_cap.trial.status, under_a_cap.trial.reason) == ("not run", "needs a GPU")


def test_a_late_row_keeps_what_it_measured():
    row = PARTS["first"][1]
    late = Trial("too slow", "not finished after 150 s", [], 150.0, losses=[2.3])
    found = {"precision": "bf16-mixed", "batch_size": 64, "step_seconds": [40.0], "grad_norm": 1.5, "process_gb": 1.0}
    result = judge(Measured(row, late, found), [], {})
    assert (result["step_seconds"], result["grad_norm"], result["process_gb"]) == (40.0, 1.5, 1.0)
    assert (result["met"], result["failures"]) == (False, ["late: not finished after 150 s"])


def test_a_row_that_would_be_late_ends_with_what_it_has(tmp_path):
    from measured_run import main

    out, settings = tmp_path / "out.json", {**TINY["vit_l_16"], "run.dir": tmp_path / "run", "run.accelerator": "cpu"}
    flags = [f"--{key}={value}" for key, value in {**settings, "batch_size": 8, "memory.micro_batch_size": 8}.items()]
    assert main([f"--out={out}", "--until=1000", "fit", str(VIT), "--run.evaluate=false", *flags]) == 0
    found, summary = read_found(out), json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (found["cut_at"], summary["status"], len(found["grad_norms"]) > 20) == (1, "interrupted", True)
    assert not (tmp_path / "run" / "checkpoints").exists()
    result = judge(Measured(PARTS["first"][2], finished(2.3), found), [], {})
    assert result["status"] == "late"
    later = judge(Measured(PARTS["first"][2], finished(2.3), {**found, "cut_at": 2}), [], {})
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
    faults = Faults("cpu", True, tmp_path, end=float("inf"))
    needs_gpu = rows(faults)["out of memory, said so"]
    broken = {"broken": (False, lambda: 1 / 0), "needs one": needs_gpu}
    found = measure_faults(faults, broken, Record("gpu_faults", {}, tmp_path))
    assert [(row["status"], row["met"]) for row in found] == [("failed", False), ("not run", None)]
    assert json.loads((tmp_path / "gpu_faults.json").read_text())["rows"][0]["reason"].startswith("ZeroDivisionError")


# -------------------------------------------------------------------------------------------------------- the gradient


def trained(folder: Path, name: str, model: type | None = None, **settings: object) -> Measured:
    """Two steps of a tiny ViT in this process, as a row would measure them."""
    from measured_run import Meter, gradients_beside

    recipe, source = load_recipe(str(VIT))
    small = {"batch_size": 16, "max_steps": 2, "run.dir": str(folder / name), "run.accelerator": "cpu"}
    quiet = dict.fromkeys(("run.evaluate", "run.predict", "run.progress"), False)
    asked = {f"memory.{key}": value for key, value in settings.items()}
    recipe = change(recipe, {**TINY["vit_l_16"], **small, **quiet, "run.devices": 1, **asked})
    if model is not None:
        fields = {field.name: getattr(recipe.model, field.name) for field in dataclasses.fields(recipe.model)}
        recipe = recipe.replace(model=model(**fields))
    out = folder / f"{name}.json"
    with Meter(out) as meter:
        meter.write(batch_size=recipe.batch_size, precision=recipe.memory.precision)
        summary = fit(recipe, source)
    with open(folder / name / "metrics.csv") as file:
        header, *lines = file.read().split()
    losses = [float(line.split(",")[header.split(",").index("loss")]) for line in lines]
    trial = Trial(summary.status, None, [], 1.0, losses=losses)
    return Measured(Row(name, "vit_l_16", reference="plain"), trial, read_found(out), gradients_beside(out))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"), "plain", micro_batch_size=16)


def too_long() -> type:
    """The benchmark's model with the right losses, whose gradients are 1 % too long."""
    recipe, _ = load_recipe(str(VIT))

    class TooLong(type(recipe.model)):
        def losses(self, module, batch):
            for loss in super().losses(module, batch):
                yield dataclasses.replace(loss, total=loss.total + 0.01 * (loss.total - loss.total.detach()))

    return TooLong


def one_left_out() -> type:
    """The benchmark's model with the right losses, of which one micro-batch gives no gradient."""
    recipe, _ = load_recipe(str(VIT))

    class OneLeftOut(type(recipe.model)):
        seen = 0

        def losses(self, module, batch):
            for loss in super().losses(module, batch):
                type(self).seen += batch["labels"].numel() == 1 and loss.total.requires_grad
                share = 0 if type(self).seen == 5 else 1
                yield dataclasses.replace(loss, total=share * loss.total + (1 - share) * loss.total.detach())

    return OneLeftOut


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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("fault", [too_long, one_left_out])
def test_a_wrong_gradient_fails_the_row_though_the_losses_are_right(fault, precision, plain, tmp_path):
    row = judge(trained(tmp_path, "row", fault(), micro_batch_size=1, precision=precision), [plain], {})
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
    from measured_run import copied

    def copy(name: str, size: int) -> dict:
        return {"ph": "X", "cat": "gpu_memcpy", "name": f"Memcpy {name}", "args": {"bytes": size}}

    events = [
        copy("HtoD (Pinned -> Device)", 100),
        copy("HtoD (Pageable -> Device)", 5),
        copy("DtoH (Device -> Pinned)", 30),
        copy("DtoD (Device -> Device)", 1000),
        {"ph": "X", "cat": "kernel", "name": "gemm", "args": {}},
    ]
    assert copied({"traceEvents": events}) == {"to_device": 105, "to_host": 30}
    assert copied({"traceEvents": [{"cat": "cpu_op", "name": "aten::add"}]}) is None


def test_memory_of_this_process_is_told_from_that_of_others():
    from measured_run import of_process

    assert of_process("123, 1000\n77, 5\n", 77) == 5 * 2**20
    assert of_process("123, 1000\n", 77) == 1000 * 2**20  # a container that numbers its processes otherwise
    assert of_process("123, 1000\n124, 5\n", 77) is None
    assert of_process("77, [N/A]\n", 77) is None
    assert of_process("", 77) is None


def test_operations_of_a_sample_are_those_of_the_published_model():
    from measured_run import flops_per_sample

    recipe, _ = load_recipe(str(VIT))
    recipe.data.prepare()
    assert flops_per_sample(recipe) == pytest.approx(3 * 2 * 61.6e9, rel=0.01)  # a product and a sum are two
