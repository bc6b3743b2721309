"""Tasks and losses of the built-in models: what is refused, saved, predicted and said of an evaluation."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from helpers.matrix import perturbed
from helpers.problems import (
    CLASSES,
    OBJECTIVES,
    Problem,
    collate,
    make_fabric,
    make_model,
    make_samples,
    tokenizer_folder,
)
from sklearn.utils.class_weight import compute_class_weight

from trainer import Memory, Optim, Recipe, Run, fit
from trainer.after.predict import predict
from trainer.checkpoint.export import load_model, save_model
from trainer.contract import Data
from trainer.data import Digits, StreamedText, TextFiles
from trainer.engine.data_feed import fill_from_data
from trainer.engine.forward import Forward
from trainer.errors import RecipeError
from trainer.models import MLP, BigBird, LoRA, Objective, TextClassifier
from trainer.models.base import balanced_weights
from trainer.planner.synthetic_data import SyntheticData
from trainer.values import TASK_METRICS, TASKS_WITHOUT_CLASSES, Loss

TEXT_TASKS = {task: name for name, (base, task, _) in reversed(OBJECTIVES.items()) if base == "distilbert"}


@pytest.mark.parametrize(
    ("task", "loss", "said"),
    [
        ("single_label", {"class_weights": []}, "class_weights=\\[\\] must be balanced, or a list"),
        ("single_label", {"class_weights": [1.0, -1.0]}, "numbers of at least 0"),
        ("single_label", {"class_weights": "even"}, "class_weights='even'.*balanced"),
        ("single_label", {"label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0 and less than 1"),
        ("single_label", {"focal_gamma": -1.0}, "focal_gamma=-1.0 must be at least 0"),
        ("single_label", {"focal_gamma": 2.0, "label_smoothing": 0.1}, "exclude each other"),
        ("single_label", {"distance": "mae"}, "distance=mae has no effect for model.task=single_label"),
        ("single_label", {"distance": "l1"}, "model.loss.distance='l1' is not one of mse, mae, huber"),
        ("regression", {"label_smoothing": 0.1}, "label_smoothing=0.1 has no effect for model.task=regression"),
        ("regression", {"class_weights": "balanced"}, "class_weights=balanced has no effect"),
        ("regression", {"huber_delta": 2.0}, "huber_delta=2.0 is for model.loss.distance huber"),
        ("regression", {"distance": "huber", "huber_delta": 0.0}, "huber_delta=0.0 must be greater than 0"),
        ("token", {}, "model.task='token' is not one of single_label, multi_label, regression"),
        ("classes", {}, "model.task='classes' is not one of"),
    ],
)
def test_losses_and_tasks_that_mean_nothing_are_refused(task, loss, said):
    with pytest.raises(RecipeError, match=said):
        MLP(task=task, loss=Objective(**loss))


def test_what_cannot_go_together_is_refused_by_name():
    with pytest.raises(RecipeError, match=r"model.padding_free=true .* model.task=token reads all"):
        TextClassifier(task="token", padding_free=True)
    with pytest.raises(RecipeError, match="regression does not fit the data, Digits has labels for single_label"):
        Recipe(model=MLP(task="regression"), data=Digits(), batch_size=8)
    with pytest.raises(RecipeError, match="token does not fit the data, StreamedText has labels for single_label"):
        Recipe(model=TextClassifier(task="token"), data=StreamedText("shards"), batch_size=8)
    with pytest.raises(RecipeError, match="class_weights has 2 weights for 10 classes: give one for each"):
        fill_from_data(MLP(loss=Objective([1.0, 2.0])), Counted(range(10), 10))
    with pytest.raises(RecipeError, match="balanced needs the training labels, and Data's train has no attribute"):
        fill_from_data(MLP(num_classes=2, loss=Objective("balanced")), Data())
    with pytest.raises(RecipeError, match="balanced: no training sample has the class 2: give the weights as a list"):
        fill_from_data(MLP(loss=Objective("balanced")), Counted([0, 1, 1], 3))


class Counted(Data):
    """A dataset of which the training labels are known."""

    def __init__(self, labels, classes):
        self.num_classes, self.train = classes, type("Split", (), {"labels": list(labels)})()


def test_balanced_weights_are_those_of_scikit_learn():
    labels = [0] * 7 + [1] * 2 + [2] * 11
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels).tolist()
    assert fill_from_data(MLP(loss=Objective("balanced")), Counted(labels, 3)).loss.class_weights == expected
    words = [labels[:4], [*labels[4:], -100], [-100]]
    assert balanced_weights("token", words, 3, None) == expected
    assert balanced_weights("multi_label", [(1.0, 0.0), (1.0, 1.0), (0.0, 1.0), (0.0, 1.0)], 2, None) == [1, 1 / 3]
    spec = Digits().spec() or type("Spec", (), {"num_classes": 3, "train": 9, "val": 0, "test": 0})
    spec.tensors, spec.length = {}, None
    assert fill_from_data(MLP(loss=Objective("balanced")), SyntheticData(spec)).loss.class_weights == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_does_not_round_labels(precision):
    labels, seen = torch.tensor([123_456.7, 1 / 3, 1e-7]), []

    class Reads(MLP):
        def losses(self, module, batch):
            seen.extend([batch["labels"], module(batch["inputs"])])
            yield Loss(seen[1].sum(), 3.0)

    fabric = make_fabric(precision, 1)
    forward = Forward(fabric, Reads(), fabric.setup_module(torch.nn.Linear(2, 1)))
    list(forward.losses({"inputs": torch.randn(3, 2), "labels": labels}))
    assert torch.equal(seen[0], labels)
    assert seen[1].dtype == (torch.bfloat16 if precision == "bf16-mixed" else torch.float16)  # of autocast


@pytest.mark.parametrize(
    ("task", "labels", "said"),
    [
        ("single_label", torch.zeros(3), r"single_label needs classes, int64 \(3,\), but got .*type float32: for"),
        ("single_label", torch.zeros(3, CLASSES), "for several labels per sample multi_label"),
        ("multi_label", torch.zeros(3, dtype=torch.long), r"0 or 1 for each label, \(3, 5\).*task single_label"),
        ("regression", torch.zeros(3), r"a number for each output, \(3, 5\), but got labels of shape \(3, 1\)"),
    ],
)
def test_labels_of_another_task_are_refused(task, labels, said):
    model = replace(make_model("mlp"), task=task)
    with pytest.raises(RecipeError, match=said):
        list(model.losses(model.build(), {"pixel_values": torch.zeros(3, 3, 4, 4), "labels": labels}))


@pytest.mark.parametrize(("task", "adapters"), [*((task, 0) for task in TEXT_TASKS), ("multi_label", 2), ("token", 2)])
def test_the_saved_model_is_that_of_transformers(task, adapters, tmp_path):
    names = [f"name {number}" for number in range(CLASSES)]
    model = replace(make_model(TEXT_TASKS[task]), class_names=names, lora=LoRA(adapters))
    module = perturbed(model.build(), 0.1)
    save_model(model, module, tmp_path)
    kind = "Token" if task == "token" else "Sequence"
    theirs = getattr(transformers, f"AutoModelFor{kind}Classification").from_pretrained(tmp_path).eval()
    assert theirs.config.id2label == dict(enumerate(names))
    problem = {"token": None, "regression": "regression"}.get(task, f"{task}_classification")
    assert theirs.config.problem_type == problem
    batch = collate(make_samples(Problem(TEXT_TASKS[task], 5, 5, 5)))
    with torch.no_grad():
        (loss,) = model.losses(module.eval(), model.packed(batch))
        (again,) = model.losses(load_model(model, tmp_path).eval(), batch)
        answer = theirs(batch["input_ids"], batch["attention_mask"]).logits
        assert loss.counted() == model.weigh(batch)["loss"]
    torch.testing.assert_close(loss.logits.reshape(answer.shape), answer, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again.total, loss.total, rtol=1e-4, atol=1e-5)


def test_bigbird_classifies_tokens_as_it_is_padded():
    model = replace(make_model("bigbird"), task="token", num_classes=CLASSES)
    assert isinstance(model, BigBird)
    assert not model.packs()
    batch = collate(make_samples(Problem("tokens", 4, 4, 4)))
    (loss,) = model.losses(model.build(), batch)
    assert loss.logits.shape == (batch["labels"].numel(), CLASSES)


def rows(task, count=40):
    """Texts whose label is to be seen in their words."""
    draw = np.random.RandomState(0)
    for row in range(count):
        bounds = [(2, 30), (90, 120), (2, 120)][row % (2 if task in ("single_label", "regression") else 3)]
        numbers = draw.randint(*bounds, draw.randint(3, 12))
        words = [f"w{number}" for number in numbers]
        tags = ["LOW" if number < 60 else "HIGH" for number in numbers]
        label = {"multi_label": sorted(set(tags)), "regression": float(numbers.mean()) / 60, "token": tags}
        yield {"text": words if task == "token" else " ".join(words), "label": label.get(task, tags[0])}


@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task in TASK_METRICS if task not in (*TASKS_WITHOUT_CLASSES, None)])
def test_a_run_says_and_predicts_what_the_task_asks_for(task, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(task)))
    sizes = {"n_layers": 1, "dim": 16, "hidden_dim": 16, "n_heads": 2, "max_position_embeddings": 16}
    file = str(tmp_path / "a.jsonl")
    recipe = Recipe(
        model=TextClassifier("distilbert", tokenizer=tokenizer_folder(), config=sizes, dropout=0.0, task=task),
        data=TextFiles(file, test_file=file, max_length=16, cache_dir=str(tmp_path / "cache")),
        optim=Optim("adamw", lr=0.02),
        batch_size=8,
        epochs=6,
        memory=Memory(micro_batch_size=3),
        run=Run(dir=str(tmp_path / "run"), accelerator="cpu", devices=1, predict=False, progress=False),
    )
    summary = fit(recipe)
    assert list(summary.metrics["test"]) == [*TASK_METRICS[task], "loss"]
    with open(tmp_path / "run" / "metrics.csv", newline="") as metrics:
        last = list(csv.DictReader(metrics))[-1]
    assert all(float(last[f"test_{name}"]) == value for name, value in summary.metrics["test"].items())
    assert not any("unknown" in str(value) for value in summary.metrics["test"].values())
    recipe = recipe.replace(model=fill_from_data(recipe.model, recipe.data))
    said = predict(recipe, tmp_path / "run", texts=["w2 w3 w4", "w118 w119 zzz w117 " + "w100 " * 20])
    low, high = said
    if task == "single_label":
        assert (low[0], high[0]) == ("LOW", "HIGH")
        assert 0.5 < low[1] < 1
    elif task == "multi_label":
        assert dict(low).keys() == {"LOW"}
        assert "HIGH" in dict(high)
    elif task == "regression":
        assert low[0] + 0.5 < high[0]
    else:
        assert [tag for tag, _ in low] == ["LOW"] * 3
        assert [tag for tag, _ in high][:2] == ["HIGH", "HIGH"]
        assert [tag for tag, _ in high][-1] == "_"  # beyond max_length
        assert len(high) == 24
    output = tmp_path / "answers.jsonl"
    predict(recipe, tmp_path / "run", paths=[file], output=str(output))
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    column = {"single_label": "label_predicted", "multi_label": "labels", "token": "tags"}.get(task, "predicted_label")
    written = {"multi_label": "|".join, "token": " ".join}.get(task, lambda label: label)
    wanted = [written(row["label"]) for row in rows(task)]
    if task == "regression":
        error = np.abs(np.array([answer[column] for answer in answers]) - wanted).mean()
        assert error == pytest.approx(summary.metrics["test"]["mae"], rel=1e-4)
    elif task == "multi_label":
        found = [answer[column] for answer in answers]
        same = [{*one.split("|")} == {*other.split("|")} for one, other in zip(found, wanted, strict=True)]
        assert np.mean(same) == pytest.approx(summary.metrics["test"]["subset_accuracy"])
    else:
        pairs = zip(" ".join(answer[column] for answer in answers).split(), " ".join(wanted).split(), strict=True)
        assert np.mean([ours == theirs for ours, theirs in pairs]) == pytest.approx(summary.metrics["test"]["accuracy"])
