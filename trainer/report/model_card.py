"""The model card: ``README.md`` of a trained model, in the format of the Hugging Face hub."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract import Exportable, Preparable, capability
from trainer.recipe import Recipe
from trainer.system.redact import redact
from trainer.system.text import escaped

FENCE = "`" * 3


@dataclass(frozen=True)
class TrainingFacts:
    """The facts about the training for a model card."""

    facts: Mapping[str, Any]  # the rows of the first table
    metrics: Mapping[str, Mapping[str, float | None]]  # as in ``summary.json``
    data: Mapping[str, Any]  # as in ``summary.json``
    versions: Mapping[str, str | None]


def build_model_card(recipe: Recipe, run_dir: Path, trained: TrainingFacts) -> str:
    """Build the model card of the run in ``run_dir``, which must contain its ``recipe.yaml``."""
    model: Any = recipe.model
    kind = "token" if model.task == "token" else "text"
    if capability(model, Preparable).tokenizer_or_none() is None:
        kind = "image" if recipe.data.load_image is not None else ""
    weights = model.weights
    base = weights if isinstance(weights, str) and weights.count("/") == 1 and not Path(weights).exists() else None
    library = "transformers" if capability(model, Exportable).own_format else None
    tasks = dict.fromkeys(("language", "preference"), "text-generation")
    tasks |= {"masked_language": "fill-mask", "pairs": "sentence-similarity"}
    task = tasks.get(model.task, f"{kind}-classification" if kind else None)
    text = (run_dir / "recipe.yaml").read_text(encoding="utf-8").partition("\n# sha256")[0]
    return model_card(run_dir.name, trained, text, task, library, base)


def model_card(
    name: str, trained: TrainingFacts, recipe: str, pipeline: str | None, library: str | None, base: str | None
) -> str:
    """Build a model card: a YAML header and Markdown, with ``recipe`` as YAML. ``pipeline`` is the task on the hub,
    ``library`` loads the model (``None``: only this package does), and ``base`` is the fine-tuned model on the hub."""
    from huggingface_hub import EvalResult, ModelCardData

    data = str(trained.data.get("class", "data"))
    common: Any = {"task_type": pipeline or "other", "dataset_type": data.lower(), "dataset_name": data}
    common["dataset_revision"] = trained.data.get("fingerprint")
    results = [
        EvalResult(**common, dataset_split=split, metric_type=metric, metric_value=float(value))
        for split, metrics in trained.metrics.items()
        for metric, value in metrics.items()
        if value is not None and math.isfinite(value)
    ]
    header = ModelCardData(
        model_name=name,
        library_name=library,
        pipeline_tag=pipeline,
        base_model=base,
        tags=["trainer", "exactbatch-trainer"],
        metrics=sorted({result.metric_type for result in results}) or None,
        eval_results=results or None,
    )
    shown = escaped(recipe.strip(), keep="\n").replace(FENCE, "")
    parts = [
        f"---\n{header.to_yaml()}\n---\n",
        f"# {escaped(name)}\n",
        "Fine-tuned with exact gradients: each step is that of the whole batch, however it was cut.\n",
        _table(trained.facts),
        "## Data\n",
        _table(trained.data),
        "## Recipe\n",
        f"{FENCE}yaml\n{shown}\n{FENCE}\n",
        "## Versions\n",
        _table(trained.versions),
    ]
    return redact("\n".join(parts))


def _table(rows: Mapping[str, Any]) -> str:
    known = {escaped(name): escaped(value).replace("|", r"\|") for name, value in rows.items() if value is not None}
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in known.items()), ""])
