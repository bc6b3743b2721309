"""Weights & Biases and MLflow: what they are told of a run, and that a resumed run goes on as the same one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from trainer import RecipeError, Run
from trainer.report import loggers
from trainer.report.loggers import make_loggers


def test_wandb_gets_project_entity_tags_and_the_id_of_the_run(tmp_path, monkeypatch):
    asked: list[dict[str, Any]] = []
    errors = SimpleNamespace(Error=type("Error", (Exception,), {}))

    def logger(**given: Any) -> Any:
        asked.append(given)
        if given["project"] == "refused":
            raise errors.Error("no such project")
        return SimpleNamespace(experiment=None)

    monkeypatch.setattr(loggers, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=lambda **given: given, errors=errors))
    monkeypatch.setitem(sys.modules, "wandb.errors", errors)
    monkeypatch.setattr("pytorch_lightning.loggers.WandbLogger", logger)
    settings = Run(project="digits", entity="team", tags=["a", "b"])
    make_loggers(["wandb"], tmp_path / "mine", {"seed": 1}, settings=settings, run_id="c0ffee")
    wanted = {"project": "digits", "entity": "team", "tags": ["a", "b"], "id": "c0ffee", "resume": "allow"}
    wanted |= {"name": "mine", "save_dir": tmp_path / "mine", "config": {"seed": 1}}
    assert asked[0].items() >= wanted.items()
    with pytest.raises(RecipeError, match=r"^run\.logger=wandb: no such project \(or set WANDB_MODE=offline\)"):
        make_loggers(["wandb"], tmp_path, {}, settings=Run(project="refused"))


def test_mlflow_goes_on_with_the_run_that_is_resumed(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    runs, settings = [], Run(project="digits", tags=["a", "b"])
    for run, step in (("c0ffee", 1), ("c0ffee", 2), ("beef", 1)):
        _, logger = make_loggers(["mlflow"], tmp_path, {"seed": 7}, settings=settings, run_id=run)
        logger.log_metrics({"loss": 1 / step}, step)
        logger.finalize("success")
        runs.append(logger._mlflow_client.get_run(logger.run_id))
    first, again, other = (run.info.run_id for run in runs)
    assert first == again != other
    assert (tmp_path / "mlflow.db").is_file()
    assert [run.data.metrics["loss"] for run in runs] == [1, 0.5, 1]
    assert runs[1].data.params == {"seed": "7"}
    assert (runs[1].data.tags["tags"], runs[1].data.tags[loggers.RUN_TAG]) == ("a, b", "c0ffee")
    assert runs[1].info.status == "FINISHED"
    with pytest.raises(RecipeError, match=r"^run\.logger=mlflow: .*run\.tracking_uri=nonsense://"):
        make_loggers(["mlflow"], tmp_path, {}, settings=Run(tracking_uri="nonsense://"))


def test_a_missing_mlflow_is_named_with_its_remedy(tmp_path, monkeypatch, golden):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with golden.raises(RecipeError, "package"):
        make_loggers(["mlflow"], tmp_path, {})
    with golden.raises(RecipeError, "unknown logger"):
        Run(logger=["comet"])  # type: ignore[list-item]
    with golden.raises(RecipeError, "no project"):
        Run(project=" ")
