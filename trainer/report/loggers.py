"""Loggers of a run: always ``metrics.csv``; TensorBoard, Weights & Biases and MLflow on request."""

from __future__ import annotations

import csv
import io
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.logger import Logger
from lightning_fabric.utilities.rank_zero import rank_zero_only

from trainer.errors import RecipeError
from trainer.recipe import Run
from trainer.report.summary import Speed
from trainer.system.files import add_path_to_errors, open_writable
from trainer.system.redact import redact, redact_words

TRAINING_COLUMNS = ("step", "epoch", "loss", "lr", "grad_norm", *Speed._fields)
FLUSH_INTERVAL = 3.0
NO_SETTINGS = Run()


def make_loggers(
    names: Sequence[str],  # any of csv, tensorboard, wandb, mlflow; csv is always included
    run_dir: Path,  # directory of metrics.csv and tensorboard/
    config: Mapping[str, Any],  # the resolved recipe, shown with the curves
    extra_columns: Sequence[str] = (),  # additional columns of metrics.csv
    metric_names: Sequence[str] = ("accuracy",),  # metrics of an evaluation, in addition to the loss
    resumed_at: int = 0,  # the step that the run resumes from; TensorBoard hides earlier logs after it
    settings: Run = NO_SETTINGS,  # project, entity, tags and tracking_uri
    run_id: str | None = None,  # the same after a resume, so that Weights & Biases and MLflow continue the run
) -> list[Logger]:
    """Build the loggers of a run for ``Fabric(loggers=...)``; only the first rank writes."""
    make: dict[str, Callable[..., Logger]] = {
        "tensorboard": partial(_tensorboard, resumed_at),
        "wandb": partial(_wandb, settings, run_id),
        "mlflow": partial(_mlflow, settings, run_id),
    }
    others = [make[name](run_dir, config) for name in dict.fromkeys(names) if name != "csv"]
    return [CSVMetrics(run_dir / "metrics.csv", extra_columns, metric_names), *others]


def require_loggers(names: Sequence[str]) -> None:
    """Reject loggers whose package is missing, before anything starts."""
    for name in ("wandb", "mlflow"):
        if name in names and find_spec(name) is None:
            raise RecipeError(f"run.logger={name} needs the package {name}: pip install 'exactbatch-trainer[{name}]'")
    if "tensorboard" in names:
        try:
            import_module("torch.utils.tensorboard")
        except ImportError as error:
            fix = "pip install 'exactbatch-trainer[tensorboard]'"
            raise RecipeError(f"run.logger=tensorboard needs the package tensorboard ({error}): {fix}") from error


def close_loggers(loggers: Sequence[Logger], status: str) -> None:
    """Flush and close the loggers. ``status`` is finished, failed or interrupted."""
    for logger in loggers:
        logger.finalize("success" if status == "finished" else status)
        # Weights & Biases uploads at interpreter exit, which a rank that exits immediately does not reach.
        finish = getattr(getattr(logger, "experiment", None), "finish", None)
        if finish is not None:
            finish(exit_code=0 if status == "finished" else 1)


class CSVMetrics(Logger):
    """A Fabric logger that appends rows to one CSV file, within seconds. Fabric's ``CSVLogger`` deletes the history of
    a resumed run, and rewrites the whole file in place for each new key."""

    name, version = "csv", ""

    def __init__(self, path: Path, extra_columns: Sequence[str] = (), metrics: Sequence[str] = ("accuracy",)) -> None:
        self.path = path
        self.of_evaluations = tuple(f"{split}_{name}" for split in ("val", "test") for name in ("loss", *metrics))
        self.columns = (*TRAINING_COLUMNS, *self.of_evaluations, *extra_columns)
        self._last_write = time.monotonic()
        self._rows: list[dict[str, Any]] = []

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row. Rows of an evaluation are written to disk at once, others within seconds."""
        row: dict[str, Any] = {} if step is None else {"step": step}
        row |= {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        unknown = [name for name in row if name not in self.columns]
        if unknown:
            raise ValueError(f"{self.path.name} has no column {', '.join(unknown)}: add it to extra_columns")
        self._rows.append(row)
        if not row.keys().isdisjoint(self.of_evaluations) or time.monotonic() - self._last_write >= FLUSH_INTERVAL:
            self.save()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """No-op: the recipe is saved in a separate file."""

    @rank_zero_only
    def save(self) -> None:
        if not self._rows:
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        if not self._continues():
            writer.writeheader()
        writer.writerows(self._rows)
        # Unbuffered, with whole rows in one write, so that a killed run leaves no partial row.
        with add_path_to_errors(self.path):
            descriptor = open_writable(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(descriptor, "ab", buffering=0) as file:
                file.write(text.getvalue().encode())
        self._rows.clear()
        self._last_write = time.monotonic()

    def _continues(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() or not self.path.stat().st_size:
            return False
        with open(self.path, newline="") as file:
            header = next(csv.reader(file))
        if header != list(self.columns):
            raise RecipeError(f"{self.path} has other columns ({', '.join(header)}): choose another run.dir")
        return True


def _tensorboard(resumed_at: int, run_dir: Path, config: Mapping[str, Any]) -> Logger:
    from lightning_fabric.loggers import TensorBoardLogger

    purge_step = resumed_at + 1 if resumed_at else None
    logger = TensorBoardLogger(run_dir, name="tensorboard", version="", purge_step=purge_step)
    # As text: TensorBoard's hyperparameter page would add a curve named hp_metric to the real ones.
    logger.experiment.add_text("recipe", "\n".join(f"    {key}: {value}" for key, value in config.items()))
    return logger


def _wandb(run: Run, run_id: str | None, run_dir: Path, config: Mapping[str, Any]) -> Logger:
    require_loggers(["wandb"])
    from pytorch_lightning.loggers import WandbLogger
    from wandb import Settings
    from wandb.errors import Error

    # The metadata of the machine contains the command line, which may have secrets.
    settings = Settings(x_disable_meta=redact_words(sys.argv) != sys.argv)
    options: dict[str, Any] = {"project": run.project, "name": run_dir.name, "save_dir": run_dir}
    options |= {"entity": run.entity, "tags": list(run.tags) or None, "id": run_id, "resume": "allow"}
    try:
        logger = WandbLogger(**options, config=dict(config), settings=settings)
        _ = logger.experiment  # logs in
    except Error as error:
        raise RecipeError(f"run.logger=wandb: {error} (or set WANDB_MODE=offline)") from error
    return logger


RUN_TAG = "trainer.run"  # the tag that identifies a run to resume, because MLflow chooses run ids itself


def _mlflow(run: Run, run_id: str | None, run_dir: Path, config: Mapping[str, Any]) -> Logger:
    require_loggers(["mlflow"])
    from mlflow.exceptions import MlflowException
    from pytorch_lightning.loggers import MLFlowLogger

    uri = run.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run_dir / 'mlflow.db'}"
    tags = {RUN_TAG: run_id or "", **({"tags": ", ".join(run.tags)} if run.tags else {})}
    where: dict[str, Any] = {"experiment_name": run.project, "tracking_uri": uri}
    try:
        logger = MLFlowLogger(**where, run_name=run_dir.name, tags=tags)
        client = logger._mlflow_client
        if run_id and (known := client.get_experiment_by_name(run.project)):
            for before in client.search_runs([known.experiment_id], f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1):
                return MLFlowLogger(**where, run_id=before.info.run_id)
        logger.log_hyperparams(dict(config))  # creates the run
    except MlflowException as error:
        raise RecipeError(f"run.logger=mlflow: {error} (run.tracking_uri={redact(uri)})") from error
    return logger
