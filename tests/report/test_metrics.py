import numpy as np
import pytest
import sklearn.metrics
import torch
from helpers.rounding import ROUNDING

from trainer.errors import RecipeError
from trainer.recipe import METRICS_BY_TASK
from trainer.report.metrics import EvaluationMetrics, classification_report
from trainer.report.mistakes import MAX_MISTAKES, TopMistakes
from trainer.values import TASK_METRICS, Loss

CLASSES = 5


def predictions(items=103):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(items, CLASSES, generator=generator)
    targets = torch.randint(0, CLASSES, (items,), generator=generator)
    targets[::10] = -100
    return logits, targets


def micro_losses(logits, targets, size):
    for rows, labels in zip(logits.split(size), targets.split(size), strict=True):
        total = torch.nn.functional.cross_entropy(rows, labels, reduction="sum")
        yield Loss(total, (labels != -100).sum(), logits=rows, targets=labels)


def evaluate(logits, targets, size):
    metrics = EvaluationMetrics(CLASSES, "cpu")
    for loss in micro_losses(logits, targets, size):
        metrics.update(loss)
    return metrics.compute()


@pytest.mark.parametrize("size", [1, 7, 103])
def test_figures_equal_torch_and_sklearn_however_the_set_is_cut(size):
    logits, targets = predictions()
    result = evaluate(logits, targets, size)
    kept = targets != -100
    truth, guess = targets[kept].numpy(), logits[kept].argmax(-1).numpy()
    assert result.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), rel=1e-6)
    assert result.accuracy == sklearn.metrics.accuracy_score(truth, guess)
    assert result.samples == result.weights["loss"] == kept.sum()
    np.testing.assert_array_equal(result.confusion, sklearn.metrics.confusion_matrix(truth, guess))


def test_report_from_the_confusion_matrix_equals_sklearn_on_the_predictions():
    logits, targets = predictions()
    kept = targets != -100
    names = ["zero", "one", "two", "three", "four"]
    expected = sklearn.metrics.classification_report(
        targets[kept].numpy(), logits[kept].argmax(-1).numpy(), target_names=names, digits=4
    )
    assert classification_report(evaluate(logits, targets, 10).confusion, names) == expected


def test_report_names_classes_that_never_occur_and_refuses_too_few_names():
    confusion = np.diag([3, 0, 2])
    assert "ghost" in classification_report(confusion, ["a", "ghost", "c"])
    assert "no samples" in classification_report(np.zeros((2, 2), dtype=int))
    with pytest.raises(ValueError, match="2 class names for 3 classes"):
        classification_report(confusion, ["a", "b"])


def test_total_loss_is_the_sum_of_the_means_of_several_losses(golden):
    metrics = EvaluationMetrics(None, "cpu", loss_names=("label", "mask"))
    for _ in range(2):
        metrics.update(Loss(torch.tensor(6.0), 3, name="label"))
        metrics.update(Loss(torch.tensor(1.0), torch.tensor(4), name="mask"))
    result = metrics.compute()
    assert result.losses == {"label": 2.0, "mask": 0.25}
    assert result.metrics() == {"loss": 2.25}
    assert result.confusion is None
    with golden.raises(ValueError, "name"):
        metrics.update(Loss(torch.tensor(1.0), 1, name="other"))
    wide = Loss(torch.tensor(1.0), 1, logits=torch.zeros(1, CLASSES + 1), targets=torch.zeros(1, dtype=torch.long))
    with golden.raises(ValueError, "classes"):
        EvaluationMetrics(CLASSES, "cpu").update(wide)


@pytest.mark.parametrize("task", ["single_label", "token", "multi_label", "regression"])
def test_an_update_never_waits_for_the_device(task):
    # A meta tensor has no values: whatever needs one on the host (item, nonzero, bincount) raises.
    metrics = EvaluationMetrics(CLASSES, "meta", task=task, wanted=METRICS_BY_TASK[task])
    logits, targets = torch.zeros(4, CLASSES, device="meta"), torch.zeros(4, dtype=torch.long, device="meta")
    targets = torch.zeros_like(logits) if task in ("multi_label", "regression") else targets
    metrics.update(Loss(logits.sum(), (targets != -100).sum(), logits=logits, targets=targets))


def test_logits_that_are_asked_for_and_missing_are_named(golden):
    metrics = EvaluationMetrics(CLASSES, "cpu", wanted=["mcc"])
    metrics.update(Loss(torch.zeros(()), 1))
    with golden.raises(RecipeError):
        metrics.compute()


def test_small_losses_keep_their_digits_and_reset_forgets_while_compute_can_be_repeated():
    metrics = EvaluationMetrics(None, "cpu")
    metrics.update(Loss(torch.tensor(2.0**24), 1))
    for _ in range(100):
        metrics.update(Loss(torch.tensor(1.0), 0))
    assert metrics.compute().loss == metrics.compute().loss == 2**24 + 100
    metrics.update(Loss(torch.tensor(0.0), 1))
    assert metrics.compute().loss == 2**23 + 50
    metrics.reset()
    assert np.isnan(metrics.compute().loss)
    assert metrics.compute().accuracy is None


def several_evaluations(cuts):
    """One object on each rank; rank r sees, before each evaluation, the micro-batches that ``cuts`` gives it."""
    metrics, results = EvaluationMetrics(CLASSES, "cpu"), []
    losses = list(micro_losses(*predictions(), 10))
    for cut in cuts:
        for index in cut[torch.distributed.get_rank()]:
            metrics.update(losses[index])
        result = metrics.compute()
        results.append((result.loss, result.accuracy, result.samples, result.confusion.tolist()))
    return results


def test_two_ranks_with_uneven_updates_equal_one_process(ranks):
    # The second evaluation adds to the first: on rank 0 alone, so rank 1 must not answer from a cache.
    cuts = [([0, 1], []), ([2, 3, 4, 5, 6, 7, 8], []), ([9], [10])]
    answers = ranks(2).run(several_evaluations, cuts)
    assert answers[0] == answers[1]
    losses = list(micro_losses(*predictions(), 10))
    for seen, (loss, *others) in zip((2, 9, 11), answers[0], strict=True):
        single = EvaluationMetrics(CLASSES, "cpu")
        for one in losses[:seen]:
            single.update(one)
        expected = single.compute()
        assert loss == pytest.approx(expected.loss, rel=ROUNDING)
        assert others == [expected.accuracy, expected.samples, expected.confusion.tolist()]


def worst(logits, targets):
    """The mistakes over the ranks, of which the last has no sample."""
    found, joined = TopMistakes(), torch.distributed.is_initialized()
    rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if joined else (0, 1)
    size = max(size, 2)  # one rank has all of them
    for start in range(rank, len(logits), size - 1) if rank < size - 1 else ():
        found.samples = [start]
        found.update(Loss(torch.zeros(()), logits=logits[start : start + 1], targets=targets[start : start + 1]))
    return [list(mistake) for mistake in found.worst()]


def test_the_worst_mistakes_are_the_same_on_two_ranks_of_which_one_has_no_sample(ranks):
    torch.manual_seed(0)
    logits, targets = torch.randn(300, 4), torch.randint(0, 4, (300,))
    targets[::10] = -100
    logits[5] = float("nan")
    alone = worst(logits, targets)
    assert [one[3] for one in alone] == sorted((one[3] for one in alone), reverse=True)
    assert 100 < len(alone) <= MAX_MISTAKES
    assert all(int(targets[at]) == target != int(logits[at].argmax()) == said for at, target, said, _, _ in alone)
    assert not {0, 5, 10} & {one[0] for one in alone}
    assert ranks(2).run(worst, logits, targets) == [alone] * 2


@pytest.mark.parametrize("task", ["single_label", "token", "multi_label", "regression"])
def test_the_metrics_of_a_task_are_those_of_the_table(task):
    metrics = EvaluationMetrics(CLASSES, "cpu", task=task)
    logits, targets = predictions()
    targets = torch.zeros_like(logits) if task in ("multi_label", "regression") else targets
    metrics.update(Loss(logits.sum(), 1.0, logits=logits, targets=targets))
    assert list(metrics.compute().metrics()) == ["loss", *TASK_METRICS[task]]
