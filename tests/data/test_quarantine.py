"""Bad samples are left out exactly, whatever the ranks, the cut and the workers, or the run ends naming them."""

import json

import pytest
import torch
from helpers.problems import Problem as Samples
from helpers.problems import collate, flat, host_sum, make_fabric, make_model, make_samples
from helpers.rounding import ROUNDING

from trainer import Memory, Recipe, Run
from trainer.api import fit
from trainer.cli import run
from trainer.contract import Data
from trainer.data import ImageFolder
from trainer.data.loader import Loader, SampleError, make_loader
from trainer.engine.data_feed import evaluation_micro_batches, make_windows
from trainer.engine.forward import Forward
from trainer.engine.memory_rehearsal import longest_window
from trainer.engine.order import batch_indices
from trainer.engine.quarantine import Quarantine, gather_texts
from trainer.engine.step import Stepper
from trainer.errors import RecipeError
from trainer.launching.world import World
from trainer.memory.plan import decide_plan
from trainer.models import MLP
from trainer.run.evaluation import make_evaluation
from trainer.run.session import Session
from trainer.values import IGNORED_LABEL, BadSample, PartialBatch, Request

pytestmark = pytest.mark.usefixtures("no_pictures")

SIZE, BATCH = 21, 6
BAD = (0, 3, 4, 11, 20)


class Split:
    """Samples of which some cannot be loaded, or have a label that is ignored."""

    def __init__(self, bad=(), ignored=(), size=SIZE):
        self.samples, self.bad = make_samples(Samples("mlp", size, 1, 1)), set(bad)
        for index in ignored:
            self.samples[index]["labels"] = torch.tensor(IGNORED_LABEL)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"broken pipe\nof {index}")
        return self.samples[index]

    def describe(self, index):
        return f"file {index}"


class Whole(Split):
    """Gives batches at once."""

    def __getitems__(self, indices):
        return collate([self[index] for index in indices])


class Own(Data):
    num_classes = 5

    def __init__(self, split, limit):
        self.train = self.test = split
        self.max_bad_samples = limit

    def collate(self, samples):
        return collate(samples)


def recipe_of(split, limit, micro, batch=BATCH):
    memory = Memory(micro_batch_size=micro)
    return Recipe(model=make_model("mlp"), data=Own(split, limit), batch_size=batch, memory=memory)


def train(world_size, micro, split, limit=5, workers=0, epochs=2):
    """SGD for two epochs; what came out of it, and what each rank knows."""
    fabric = make_fabric("64-true", world_size)
    recipe = recipe_of(split, limit, micro)
    torch.manual_seed(0)
    module = recipe.model.build().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    stepper = Stepper(fabric, recipe.model, fabric.setup_module(module), optimizer)
    quarantine = Quarantine(limit)
    loader, reduce = make_loader(recipe, split, workers), list if world_size == 1 else host_sum
    windows = make_windows(recipe, loader, fabric.global_rank, world_size, reduce, quarantine)
    found = {"losses": [], "samples": [], "met": []}
    try:
        for epoch in range(epochs):
            for window in windows.epoch(epoch):
                result = stepper.step(window)
                found["losses"].append(result.loss)
                found["samples"].append(result.samples)
                found["met"] += [i for micro in window if not micro.is_empty for i in micro.indices]
    except RecipeError as error:
        found["error"] = str(error)
    return found | {"weights": flat(module), "quarantine": quarantine.state_dict(), "step": len(found["losses"])}


@pytest.fixture(scope="module")
def ignored():
    """The same run, in which the labels of the bad samples carry no weight."""
    return train(1, 6, Split(ignored=BAD))


def require_exact(answers, ignored):
    """Every rank trained as if the bad samples had no weight, and all of them know the same."""
    places = [(epoch, step) for epoch in range(2) for step in range(-(-SIZE // BATCH))]
    samples = [len(set(batch_indices(0, *place, SIZE, BATCH)) - set(BAD)) for place in places]
    for answer in answers:
        torch.testing.assert_close(answer["weights"], ignored["weights"], rtol=ROUNDING, atol=ROUNDING)
        assert answer["losses"] == pytest.approx(ignored["losses"], rel=ROUNDING)
        assert answer["samples"] == samples
        assert answer["quarantine"] == answers[0]["quarantine"]
    known = answers[0]["quarantine"]["samples"]
    assert {entry["position"] for entry in known} == set(BAD)
    assert {"split": "train", "position": 3, "description": "file 3", "reason": "OSError: broken pipe"} in known
    met = sorted(index for answer in answers for index in answer["met"])
    assert met == sorted([*(set(range(SIZE)) - set(BAD))] * 2)


@pytest.mark.parametrize(
    ("kind", "micro", "workers"), [(Split, 6, 0), (Split, 4, 0), (Whole, 4, 0), (Split, 1, 0), (Whole, 2, 2)]
)
def test_the_gradients_are_those_of_the_other_samples(kind, micro, workers, ignored):
    require_exact([train(1, micro, kind(bad=BAD), workers=workers)], ignored)


@pytest.mark.parametrize(("world_size", "micro"), [(2, 1), (3, 2), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_ranks_agree_with_one_process(world_size, micro, ignored, ranks):
    require_exact(ranks(world_size).run(train, world_size, micro, Split(bad=BAD)), ignored)


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_all_ranks_exceed_the_limit_at_the_same_step_with_the_same_names(limit, ranks):
    alone = train(1, 6, Split(bad=BAD), limit)
    if limit == 0:  # the first bad sample ends the run
        assert "could not be loaded: OSError: broken pipe" in alone["error"]
        return
    for world_size, micro in ((2, 1), (3, 2)):
        for answer in ranks(world_size).run(train, world_size, micro, Split(bad=BAD), limit):
            assert (answer["error"], answer["step"]) == (alone["error"], alone["step"])
            torch.testing.assert_close(answer["weights"], alone["weights"], rtol=ROUNDING, atol=ROUNDING)
    assert f"which exceeds data.max_bad_samples={limit}: file " in alone["error"]
    assert len(alone["quarantine"]["samples"]) > limit


def test_known_bad_samples_are_not_asked_for_again():
    asked = []

    class Counting(Split):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    def times(epochs):
        asked.clear()
        train(1, 1, Counting(bad=BAD), epochs=epochs)
        return [asked.count(index) for index in (*BAD, 15)]  # 15 is not borrowed by any

    once, twice = times(1), times(2)
    assert (once[:-1], 2 * once[-1]) == (twice[:-1], twice[-1])


def test_what_is_restored_is_left_out_from_the_start():
    first, again = Quarantine(5), Quarantine(5)
    first.exchange("train", [BadSample(index, f"file {index}", "gone") for index in BAD], list, 0, 1)
    state = json.loads(json.dumps(first.state_dict()))
    again.load_state_dict(state)
    assert again.state_dict() == first.state_dict()
    assert again.filter("train", range(6)) == [1, 2, 5]
    assert list(again.filter("test", range(6))) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RecipeError, match=r"5 samples cannot be loaded, which exceeds data\.max_bad_samples=4"):
        Quarantine(4).load_state_dict(state)


def gather(texts):
    rank = torch.distributed.get_rank()
    return gather_texts(texts[rank], host_sum, rank, len(texts))


def test_texts_of_ranks_come_together_by_sums(ranks):
    for texts in (["", "déjà", "x" * 300], ["a", "", ""], ["", "", ""]):
        assert ranks(3).run(gather, texts) == [texts] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_micro_batch_that_lost_all_its_samples_borrows_one(workers):
    loader = Loader(Split(bad=BAD), collate, workers=workers, max_bad_samples=3)
    whole, part, none = loader([Request([1, 2]), Request([2, 3]), Request([3, 4])])
    assert not isinstance(whole, PartialBatch)
    assert (part.kept_indices, part.bad) == ([2], [BadSample(3, "file 3", "OSError: broken pipe")])
    assert (none.kept_indices, [sample.position for sample in none.bad]) == ([], [3, 4])
    assert torch.equal(none.batch["pixel_values"][0], Split()[5]["pixel_values"])


def test_a_split_that_is_gone_and_samples_that_only_fail_together_end_the_run_at_once():
    def refuse(samples):
        if len(samples) > 1:
            raise RuntimeError("sizes differ")
        return collate(samples)

    with pytest.raises(SampleError, match=r"6 samples in a row cannot be loaded.*the last is file 6: OSError"):
        list(Loader(Split(bad=range(SIZE)), collate, max_bad_samples=4)([Request([1])]))
    with pytest.raises(SampleError, match="file 1, file 2 could not be loaded: RuntimeError: sizes differ"):
        list(Loader(Split(), refuse, max_bad_samples=4)([Request([1, 2])]))


def evaluate(world_size, split, limit, micro=2):
    fabric = make_fabric("64-true", world_size)
    recipe = recipe_of(split, limit, micro, batch=8)
    torch.manual_seed(0)
    module = fabric.setup_module(recipe.model.build().double())
    session = Session(recipe, decide_plan(recipe, world_size), fabric, World("python", "cpu", world_size))
    run_evaluation = make_evaluation(session, Forward(fabric, recipe.model, module), "test")
    first, second = run_evaluation(), run_evaluation()
    assert (first.loss, first.samples) == pytest.approx((second.loss, second.samples))
    return first.loss, first.samples, [sample.position for sample in session.quarantine.found.values()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_leaves_them_out_on_any_number_of_ranks(world_size, ranks, capsys):
    loss, samples, _ = evaluate(1, Split(ignored=BAD), 0)
    assert samples == SIZE - len(BAD)
    arguments = (world_size, Split(bad=BAD), len(BAD), 1)
    answers = [evaluate(*arguments)] if world_size == 1 else ranks(world_size).run(evaluate, *arguments)
    for answer in answers:
        assert answer == (pytest.approx(loss, rel=ROUNDING), samples, list(BAD))
    if world_size == 1:
        warnings = capsys.readouterr().err.splitlines()
        assert len(warnings) == len(BAD)
        assert warnings[1] == "trainer: warning: left out: file 3 (test sample 3): OSError: broken pipe"


@pytest.fixture
def own(folder):
    """Images of two classes, of which one is no image and one is cut off; and what trains on them."""
    sorted((folder / "train" / "cat").iterdir())[2].write_bytes(b"no image")
    cut = sorted((folder / "test" / "ship").iterdir())[1]
    cut.write_bytes(cut.read_bytes()[:500])

    def recipe(limit, run_dir="run"):
        data = ImageFolder(str(folder), image_size=8, max_bad_samples=limit)
        run = Run(dir=str(folder.parent / run_dir), progress=False, predict=False)
        memory = Memory(micro_batch_size=4)
        return Recipe(model=MLP([8]), data=data, batch_size=8, epochs=2, memory=memory, run=run)

    return recipe


def test_a_run_writes_what_it_left_out(own, tmp_path, capsys):
    assert fit(own(2)).status == "finished"
    written = json.loads((tmp_path / "run" / "quarantine.json").read_text())
    assert written["max_bad_samples"] == 2
    assert [(entry["split"], entry["position"]) for entry in written["samples"]] == [("train", 2), ("test", 4)]
    assert written["samples"][0]["description"].endswith(".png")
    assert "no known image format" in written["samples"][0]["reason"]
    assert capsys.readouterr().err.count("trainer: warning: left out: ") == 2


def test_a_run_with_more_than_it_may_leave_out_does_not_start(own):
    with pytest.raises(RecipeError, match=r"2 of 16 images cannot be read \(data\.max_bad_samples=1\): .*png"):
        fit(own(1))
    with pytest.raises(RecipeError, match=r"2 of 16 images cannot be read: "):
        fit(own(0))


def test_a_prediction_and_the_rehearsal_leave_them_out_without_counting(own):
    recipe = own(2)
    recipe.data.prepare()
    loader = make_loader(recipe, recipe.data.train)
    windows = make_windows(recipe, loader, world_size=3, reduce=lambda values: values * 1)
    met = {index for window in windows.epoch(0) for micro in window for index in micro.indices}
    assert met
    assert 2 not in met
    assert len(windows.quarantine) == 0
    recipe = recipe_of(Split(bad=BAD), 1, micro=6)
    windows = make_windows(recipe, make_loader(recipe, recipe.data.train), quarantine=Quarantine(1))
    assert longest_window(windows, 1).weights == {"loss": 3.0}  # of the samples 0 to 5
    assert len(windows.quarantine) == 0


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 4, 5], r"^file 2 has the label 5, but valid labels are 0 to 4 \(5 classes\)"),
        ([0, -1, 4], r"^file 1 has the label -1"),
        ([0, -100, 4], None),
    ],
)
@pytest.mark.parametrize("kind", [Split, Whole])
def test_labels_that_no_class_has_are_named(kind, labels, message):
    split, requests = kind(size=3), [Request([0, 1, 2])]
    for sample, label in zip(split.samples, labels, strict=True):
        sample["labels"] = torch.tensor(label)
    loader = Loader(split, collate, num_classes=5)
    if message is None:
        assert next(loader(requests))["labels"].tolist() == labels
        return
    with pytest.raises(SampleError, match=message):
        list(loader(requests))
    (batch,) = Loader(split, collate, num_classes=5, max_bad_samples=1)(requests)
    assert len(batch.kept_indices) == 2
    assert "label" in batch.bad[0].reason


def test_labels_of_tokens_are_looked_at_too():
    def load(labels):
        return list(Loader([0, 1], lambda samples: {"labels": labels}, num_classes=5)([Request([0, 1])]))

    labels = torch.full((2, 40), -100)
    labels[1, 7] = 4
    load(labels), load(torch.tensor([7.5, 1.0]))
    labels[1, 7] = 5
    with pytest.raises(SampleError, match=r"^sample 1 of list has the label 5"):
        load(labels)


def test_a_run_with_a_wrong_label_ends_with_one_line(tmp_path, capsys):
    path = tmp_path / "wrong.py"
    path.write_text(
        "import torch\n"
        "from dataclasses import dataclass\n"
        "from trainer import Data, Memory, Recipe, Run\n"
        "from trainer.models import MLP\n"
        "@dataclass\n"
        "class Own(Data):\n"
        "    num_classes, channels, image_size = 2, 1, 4\n"
        "    def prepare(self, tokenizer=None):\n"
        "        self.train = [{'pixel_values': torch.ones(1, 4, 4), 'labels': i % 3} for i in range(9)]\n"
        "recipe = Recipe(model=MLP([4]), data=Own(), batch_size=9, memory=Memory(micro_batch_size=3),\n"
        "                run=Run(progress=False, predict=False))\n"
    )
    assert run(["fit", str(path), "--run.dir", str(tmp_path / "run")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("trainer: error: sample ")
    assert "has the label 2, but valid labels are 0 to 1 (2 classes)" in line


def test_micro_batches_of_an_evaluation_are_as_many_on_every_rank():
    recipe = recipe_of(Split(bad=BAD), 5, micro=1, batch=8)
    loader, quarantine = make_loader(recipe, recipe.data.test), Quarantine(5)
    for _ in range(2):  # unknown, then known
        micro_batches = list(evaluation_micro_batches("test", [[0], [3, 4], [5], []], loader, quarantine))
        assert [micro.is_empty for micro in micro_batches] == [True, True, False, True]
        assert [list(micro.indices) for micro in micro_batches] == [[], [], [5], []]
    assert len(quarantine) == 3
