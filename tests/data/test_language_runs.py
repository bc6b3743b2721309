"""Runs on conversations and documents: the same batches on any ranks, and a resume bit for bit."""

from collections import Counter
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.resumed import losses, recipe, saved

from trainer import Memory, Recipe
from trainer.api import fit
from trainer.data import Conversations, Documents, Mixture
from trainer.data.loader import make_loader
from trainer.doctor.context import CheckContext
from trainer.doctor.samples import duplicates, samples, vocabulary
from trainer.engine.data_feed import make_windows
from trainer.errors import RecipeError
from trainer.launching.world import World
from trainer.models import CausalLM
from trainer.planner.predict import prepare_recipe as planned

pytestmark = pytest.mark.usefixtures("no_pictures")

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS = ("conversations", "documents", "stream", "mixture")


def model(**settings):
    return CausalLM("llama", tokenizer="bytes", config={**SIZES, "num_key_value_heads": 2}, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """40 conversations in two Parquet files, and 10 documents."""
    folder = tmp_path_factory.mktemp("language")
    for part in range(2):
        rows = [{"prompt": f"what is {n}?", "completion": f"it is{' very' * (n % 5)} {n}."} for n in range(part, 40, 2)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{part}.parquet", row_group_size=6)
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"{number} green bottles\n" * (1 + number))
    return folder


@pytest.fixture
def data(folder):
    def data(kind, **settings):
        common = {"cache_dir": str(folder / "cache"), "max_length": 64, **settings}
        if kind == "mixture":
            return Mixture([(data("conversations"), 0.4), (data("documents"), 0.6)])
        if kind == "documents":
            return Documents(str(folder / "*.txt"), **common)
        streamed = {"streamed": True, "shuffle_buffer": 12} if kind == "stream" else {}
        return Conversations(str(folder), chat_template="chatml", **common, **streamed)

    return data


def rows_of(batch):
    """What is learned of each sample of a batch, without its padding."""
    found = zip(*(batch[name].tolist() for name in ("input_ids", "labels", "attention_mask")), strict=True)
    for ids, labels, mask in found:
        length = sum(mask)
        assert mask == [1] * length + [0] * (len(mask) - length)
        assert set(labels[length:]) <= {-100}
        yield tuple(ids[:length]), tuple(labels[:length])


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_the_same_on_any_ranks_and_in_any_cut(data, kind):
    found = []
    for ranks, micro in ((1, 12), (2, 3), (3, 2)):
        own = Recipe(model=model(), data=data(kind), batch_size=12, memory=Memory(micro_batch_size=micro), seed=3)
        own.data.prepare(own.model.tokenizer_or_none())
        shares = []
        for rank in range(ranks):
            windows = make_windows(own, make_loader(own, own.data.train), rank, ranks)
            steps = [[micro for micro in window if not micro.is_empty] for window in windows.epoch(1)]
            shares.append([[row for micro in step for row in rows_of(micro.batch)] for step in steps])
        found.append([Counter(chain.from_iterable(step)) for step in zip(*shares, strict=True)])
        # The weights add up to the tokens that are predicted.
        weight = sum(own.model.weigh(micro.batch)["loss"] for step in steps for micro in step)
        assert weight == sum(label != -100 for step in shares[-1] for _, labels in step for label in labels[1:])
    assert len(found[0]) == -(-len(own.data.train) // 12)
    assert found[0] == found[1] == found[2]
    assert kind == "mixture" or sum(map(Counter.total, found[0])) == len(own.data.train)


@pytest.mark.parametrize("kind", ["stream", pytest.param("documents", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(data, tmp_path, kind):
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    changes = {"model": model(), "batch_size": 16, "memory": {"micro_batch_size": 8}}
    fit(recipe(whole, data=data(kind), **changes))
    run = {"resume": str(whole / "checkpoints" / "step-00000002")}  # in the middle of an epoch
    said = r"was saved with a different recipe: data\.max_length: 64 in the checkpoint, 60 now"
    with pytest.raises(RecipeError, match=said):
        fit(recipe(tmp_path / "other", data=data(kind, max_length=60), run=run, **changes))
    fit(recipe(rest, data=data(kind), run=run, **changes))
    assert losses(rest) == losses(whole)
    last = f"{len(losses(whole)):08d}"
    names = [path.name for path in (whole / "checkpoints").iterdir()]
    assert f"step-{last}" in names
    assert saved(rest, int(last)) == saved(whole, int(last))


def test_the_doctor_looks_at_samples_and_finds_those_that_are_there_twice(data, folder):
    own = Recipe(model=model(), data=data("documents", test_files=str(folder / "3.txt")), batch_size=4)
    subject = CheckContext(planned(own), "own", World("python", "cpu", 1), True)
    said = [f"{one.status} {one.text}" for check in (samples, duplicates, vocabulary) for one in check(subject)]
    assert not [line for line in said if line.startswith("FAIL")], said
    assert any(f"{folder}/3.txt equals {folder}/3.txt" in line for line in said)


def test_a_plan_is_made_of_an_outline_where_the_data_is_not_here():
    own = Recipe(model=model(), data=Conversations(name="nobody/has-this", max_length=32), batch_size=4)
    made = planned(own, outlines=True)
    assert "planned with 10,000 synthetic samples of 32 tokens" in made.data.notes[0]
    batch = made.data.train.__getitems__([0, 1])
    assert own.model.weigh(batch) == {"loss": 2.0 * 31}
