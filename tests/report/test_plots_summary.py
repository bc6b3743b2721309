import csv
import json
from importlib import metadata
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest

import trainer.report.loggers as loggers
from trainer.errors import RecipeError
from trainer.report.loggers import CSVMetrics, make_loggers
from trainer.report.plots import plot_curves, plot_memory
from trainer.report.summary import DISTRIBUTIONS, Summary, summary_rows, summary_text, versions


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def a_run(path, steps):
    """A run's metrics.csv as the loggers write it."""
    logger = CSVMetrics(path)
    for step in range(1, steps + 1):
        row = {"epoch": step // 30, "loss": 1 / step, "lr": 2e-3 * (1 - step / steps), "grad_norm": 1.0}
        logger.log_metrics(row | {"samples_per_second": 1234.5}, step)
        if step % 30 == 0:
            logger.log_metrics({"val_loss": 1 / step + 0.05, "val_accuracy": 1 - 1 / step}, step)
    logger.log_metrics({"test_loss": 0.2, "test_accuracy": 0.975}, steps)
    logger.finalize("success")


def test_rows_are_read_back_as_they_were_logged(tmp_path):
    a_run(tmp_path / "metrics.csv", steps=30)
    rows = rows_of(tmp_path / "metrics.csv")
    assert [int(row["step"]) for row in rows] == [*range(1, 31), 30, 30]
    assert float(rows[3]["lr"]) == 2e-3 * (1 - 4 / 30)
    assert rows[3]["val_loss"] == ""
    assert float(rows[-1]["test_accuracy"]) == 0.975


def test_rows_reach_the_disk_within_seconds_and_at_an_evaluation(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loggers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    logger = CSVMetrics(tmp_path / "metrics.csv")
    logger.log_metrics({"loss": 1.0}, 1)
    now[0] = 3.0
    logger.log_metrics({"loss": 1.0}, 2)
    assert len(rows_of(logger.path)) == 2
    logger.log_metrics({"loss": 1.0}, 3)
    assert len(rows_of(logger.path)) == 2
    logger.log_metrics({"val_loss": 1.0}, 3)
    assert len(rows_of(logger.path)) == 4


def test_an_existing_file_is_continued_and_one_of_another_kind_refused(tmp_path):
    for step in (1, 2):
        logger = CSVMetrics(tmp_path / "metrics.csv")
        logger.log_metrics({"loss": 0.5}, step)
        logger.finalize("success")
    assert [row["step"] for row in rows_of(logger.path)] == ["1", "2"]
    with pytest.raises(ValueError, match="no column sped"):
        logger.log_metrics({"sped": 1.0}, 1)
    other = CSVMetrics(tmp_path / "metrics.csv", extra_columns=["loss_mask"])
    other.log_metrics({"loss_mask": 0.5}, 3)
    with pytest.raises(RecipeError, match=r"metrics\.csv has other columns"):
        other.save()


def test_csv_is_always_there_and_tensorboard_is_when_asked_for(tmp_path):
    assert [type(logger).__name__ for logger in make_loggers([], tmp_path, {})] == ["CSVMetrics"]
    made = make_loggers(["csv", "tensorboard"], tmp_path, {"batch_size": 64})
    for logger in made:
        logger.log_metrics({"loss": 0.5}, 1)
        logger.finalize("success")
    assert (tmp_path / "metrics.csv").exists()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_a_missing_wandb_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install 'exactbatch-trainer\[wandb\]'"):
        make_loggers(["wandb"], tmp_path, {})


def has_colour(pixels, hexadecimal):
    wanted = np.array([int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return bool((np.abs(pixels[..., :3] - wanted).max(-1) < 0.01).any())


def curves_of(folder):
    plot_curves(folder / "metrics.csv", folder / "curves.png")
    assert not list(folder.glob(".curves*"))
    pixels = matplotlib.image.imread(folder / "curves.png")
    assert pixels.shape[:2] == (800, 1200)
    return pixels


def test_every_curve_of_a_run_is_drawn(tmp_path):
    a_run(tmp_path / "metrics.csv", steps=300)
    pixels = curves_of(tmp_path)
    assert all(has_colour(pixels, colour) for colour in ("#0072B2", "#D55E00", "#009E73"))


@pytest.mark.parametrize(
    "content",
    ["", "step,loss,lr\n1,0.5,\n2,nan,0.1\n3,inf,0.1\n4,0.2,0.1,7\n5,0.", "step,val_loss\n,\n1,0.5\n"],
    ids=["empty", "not finite, and torn", "no loss"],
)
def test_missing_columns_and_broken_cells_leave_a_picture(tmp_path, content):
    (tmp_path / "metrics.csv").write_text(content)
    curves_of(tmp_path)


def memory_of(on_gpu):
    """A memory section as the monitor reports it, of a run without an evaluation."""
    phases = {
        phase: {"allocated_gb": 1.0 + n if on_gpu else None, "reserved_gb": 2.0 + n if on_gpu else None, "host_gb": 0.9}
        for n, phase in enumerate(("init", "forward", "backward", "step"))
    }
    whole = {"allocated_gb": 4.0, "reserved_gb": 5.0} if on_gpu else {"allocated_gb": None, "reserved_gb": None}
    missing = {"evaluation": dict.fromkeys(("allocated_gb", "reserved_gb", "host_gb"))}
    return whole | {"host_peak_gb": 0.95, "host_idle_gb": 0.8, "phases": phases | missing}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_peaks_by_phase_and_memory_over_steps_are_drawn(on_gpu, tmp_path):
    plot_memory(memory_of(on_gpu), [(step, 1.0) for step in range(1, 40)], tmp_path / "memory.png")
    assert not list(tmp_path.glob(".memory*"))
    pixels = matplotlib.image.imread(tmp_path / "memory.png")
    assert pixels.shape[:2] == (500, 1200)
    peaks, levels = pixels[:, :600], pixels[:, 600:]
    assert has_colour(peaks, "#0072B2")
    assert has_colour(peaks, "#D55E00") == on_gpu
    assert has_colour(levels, "#0072B2")
    assert not has_colour(levels, "#D55E00")


def test_a_run_that_died_early_has_a_picture(tmp_path):
    plot_memory({}, [], tmp_path / "memory.png")


def a_summary(**changes):
    fields = {
        "status": "finished",
        "steps": 960,
        "skipped_steps": 2,
        "world_size": 2,
        "launcher": "torchrun",
        "nodes": 1,
        "backend": "gloo",
        "batch_size": 64,
        "micro_batch_size": 16,
        "accumulate": {0: 2, 4: 1},
        "metrics": {"test": {"accuracy": 0.975, "loss": 0.1234}},
        "memory": {"allocated_gb": None, "reserved_gb": 0.0, "host_peak_gb": 0.52},
        "samples_per_second": 1234.5,
        "seconds": 43.2,
        "versions": versions(),
    }
    return Summary(**(fields | changes))


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


KEYS = (
    "status steps skipped_steps recoveries world_size launcher nodes backend batch_size micro_batch_size accumulate "
    "metrics best memory samples_per_second tokens_per_second data_share mfu seconds total_seconds versions data "
    "attention"
)


def test_the_keys_are_those_that_others_read():
    content = strict(a_summary().to_json())
    assert list(content) == KEYS.split()
    assert content["metrics"] == {"test": {"accuracy": 0.975, "loss": 0.1234}}
    assert content["accumulate"] == {"0": 2, "4": 1}


def test_figures_that_are_not_finite_become_null_also_from_numpy():
    metrics = {"test": {"accuracy": np.float32("nan"), "loss": float("inf")}}
    content = strict(a_summary(metrics=metrics, seconds=float("nan"), steps=np.int64(3)).to_json())
    assert content["metrics"]["test"] == {"accuracy": None, "loss": None}
    assert (content["seconds"], content["steps"]) == (None, 3)


def test_versions_name_every_library_and_null_what_is_missing(monkeypatch):
    def version(name):
        if name == "datasets":
            raise metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(metadata, "version", version)
    found = versions.__wrapped__()  # read anew
    assert [*found] == ["python", "trainer", *DISTRIBUTIONS]
    assert {"torch", "lightning", "transformers"} <= {*DISTRIBUTIONS}
    assert [name for name, value in found.items() if value is None] == ["datasets"]


def test_the_text_holds_every_figure_with_its_unit_and_the_files(tmp_path, golden):
    (tmp_path / "metrics.csv").touch()
    golden(summary_text(a_summary(), tmp_path), "finished")
    writes = summary_text(a_summary(), tmp_path, writes=True).splitlines()[-1]
    assert writes == f"what it writes  trainer predict {tmp_path} --text TEXT"
    memory = {"allocated_gb": 1.5, "reserved_gb": 2.0, "host_peak_gb": 3.0}
    predicted = {"predicted_reserved_gb": 2.2, "prediction_error": 0.1}
    broken = a_summary(metrics={"test": {"accuracy": None, "loss": float("nan")}}, memory=memory | predicted)
    golden(summary_text(broken, tmp_path), "unknown metrics")


@pytest.mark.parametrize("on_gpu", [True, False], ids=["GPU", "CPU"])
def test_the_rows_have_the_peaks_by_phase_with_unit_and_kind(golden, on_gpu):
    golden("\n".join(map(": ".join, summary_rows(a_summary(memory=memory_of(on_gpu))))))


@pytest.mark.parametrize("on_gpu", [True, False], ids=["GPU", "CPU"])
def test_the_text_is_six_lines_with_the_total_duration(tmp_path, golden, on_gpu):
    predicted = {"predicted_reserved_gb": 0.1, "prediction_error": 0.02}
    summary = a_summary(memory=memory_of(on_gpu) | predicted, total_seconds=75.0, attention=())
    golden(summary_text(summary, tmp_path))
    assert len(summary_text(summary, tmp_path).splitlines()) == 6
