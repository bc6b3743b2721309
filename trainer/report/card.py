"""The model card: ``README.md`` beside a trained model, as the Hugging Face hub reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.report.summary import Summary, summary_rows
from trainer.system.redact import redact
from trainer.system.text import escaped

NO_FENCE = "`" * 3


def model_card(
    name: str, summary: Summary, recipe: str, plan: str, pipeline: str | None, library: str | None, base: str | None
) -> str:
    """The card of the model of a run: a YAML header and Markdown.

    Args:
        name: of the run.
        summary: of the run.
        recipe: its settings as YAML.
        plan: how the batch was cut, and what saved memory.
        pipeline: the hub's name of the task, such as text-classification.
        library: what loads the model, such as transformers; ``None`` for none but this.
        base: the model on the hub that it was fine-tuned from.
    """
    from huggingface_hub import EvalResult, ModelCardData

    data = str(summary.data.get("class", "data"))
    results = [
        EvalResult(
            task_type=pipeline or "other",
            dataset_type=data.lower(),
            dataset_name=data,
            dataset_split=split,
            dataset_revision=summary.data.get("fingerprint"),
            metric_type=metric,
            metric_value=float(value),
        )
        for split, figures in summary.metrics.items()
        for metric, value in figures.items()
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
    versions = {library: version for library, version in summary.versions.items() if version}
    return redact(
        "\n".join(
            [
                f"---\n{header.to_yaml()}\n---\n",
                f"# {escaped(name)}\n",
                "Fine-tuned with exact gradients: each step is that of the whole batch, however it was cut.\n",
                _table({"plan": plan, **dict(summary_rows(summary))}),
                "## Data\n",
                _table({key: value for key, value in summary.data.items() if value is not None}),
                "## Recipe\n",
                f"{NO_FENCE}yaml\n{escaped(recipe.strip(), keep=LINES).replace(NO_FENCE, '')}\n{NO_FENCE}\n",
                "## Versions\n",
                _table(versions),
            ]
        )
    )


LINES = "\n"


def _table(rows: Mapping[str, Any]) -> str:
    cells = [(escaped(name), escaped(value).replace("|", r"\|")) for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells), ""])
