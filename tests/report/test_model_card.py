"""The model card: the hub's own reader finds the figures, and Markdown of others stays text."""

from __future__ import annotations

from huggingface_hub import ModelCard

from trainer.report.model_card import TrainingFacts, model_card
from trainer.report.summary import Summary, summary_rows

METRICS = {"test": {"accuracy": 0.875, "loss": 0.25, "auroc": float("nan"), "f1_macro": None}}
SECRET = "hf_" + "abcdefgh" * 4
FACTS = {"steps": 12, "skipped_steps": 0, "world_size": 2, "launcher": "torchrun", "nodes": 1, "backend": "gloo"}
FACTS |= {"batch_size": 64, "micro_batch_size": 16, "accumulate": 2, "memory": {"host_peak_gb": 1.5}, "seconds": 3.0}


def card(metrics=METRICS) -> str:
    data = {"class": "IMDb", "train": 25000, "val": None, "fingerprint": "c0ffee"}
    given = {"status": "finished", "metrics": metrics, "data": data, "samples_per_second": 9.0, **FACTS}
    recipe = f"recipe: distilbert_imdb\nnote: |\n  ```\n  {SECRET}\n"
    summary = Summary(**given, versions={"torch": "2.11", "timm": None})
    trained = TrainingFacts(dict(summary_rows(summary)), metrics, data, summary.versions)
    return model_card("a|b", trained, recipe, "text-classification", "transformers", "org/base")


def test_the_hub_reads_task_base_and_figures():
    found = ModelCard(card()).data
    assert (found.pipeline_tag, found.library_name, found.base_model) == (
        "text-classification",
        "transformers",
        "org/base",
    )
    assert {one.metric_type: one.metric_value for one in found.eval_results} == {"accuracy": 0.875, "loss": 0.25}
    assert {(one.dataset_name, one.dataset_split, one.dataset_revision) for one in found.eval_results} == {
        ("IMDb", "test", "c0ffee")
    }


def test_the_text_has_recipe_data_and_versions_and_no_secret(golden):
    text = card()
    assert SECRET not in text
    assert text.count("```") == 2  # what a setting has of it does not end the block
    golden(text)


def test_a_run_without_an_evaluation_has_a_card():
    assert ModelCard(card(metrics={})).data.eval_results is None
