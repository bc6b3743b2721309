"""The benchmark of throughput: everybody has the same samples, and what was cut short goes on."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
from helpers.benchmark import imported

common, throughput = imported("common", "throughput")


@pytest.fixture
def place(tmp_path):
    """Four thousand texts of the lengths of reviews."""
    drawn = np.random.default_rng(0)
    lengths = np.clip(drawn.lognormal(5.4, 0.6, 4000), 10, 512).astype(int)
    np.savez(tmp_path / "distilbert.npz", tokens=np.ones(lengths.sum(), int), lengths=lengths, labels=lengths % 2)
    return tmp_path


def padding(lengths, size):
    cut = [lengths[at : at + size] for at in range(0, len(lengths), size)]
    return 1 - sum(lengths) / sum(size * max(part) for part in cut)


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_train_on_the_same_texts_in_orders_with_the_padding_of_a_whole_epoch(place, ranks):
    work, found = throughput.DISTILBERT, []
    lengths = throughput.Texts(place / "distilbert.npz").lengths
    for number in range(10):
        drawn = throughput.draw(work, place, number, ranks)
        assert len(set(drawn.order)) == len(drawn.order) == (1 + work.steps) * work.batch
        grouped = [drawn.order[position] for position in drawn.grouped]
        assert sorted(grouped) == sorted(drawn.order)
        assert grouped[: work.batch] == drawn.order[: work.batch]  # what warms up
        counted = [lengths[index] for index in drawn.order[work.batch :]]
        assert sum(counted) == drawn.tokens
        together = [lengths[index] for index in grouped[work.batch :]]
        found.append((padding(counted, work.micro_batch), padding(together, work.micro_batch)))
    others, grouped = np.mean(found, axis=0)
    order = np.random.default_rng(1).permutation(lengths).tolist()
    assert others == pytest.approx(padding(order, work.micro_batch), abs=0.04)
    assert grouped < 0.02


def test_ours_gets_the_samples_in_the_order_of_the_others(place, sample_data, monkeypatch):
    monkeypatch.setenv("TRAINER_TEST_DATA", str(sample_data))
    drawn = throughput.draw(throughput.DISTILBERT, place, 0, 1)
    data = throughput.recipe(throughput.DISTILBERT, drawn, place, place, 1, "32-true").data
    visited = throughput.permutation(0, 0, len(drawn.order)).tolist()
    assert [data.picked[index] for index in visited] == drawn.order


def test_a_benchmark_cut_short_goes_on_and_failures_are_rows(place, monkeypatch, capsys):
    asked = Namespace(
        rounds=2, steps=None, ranks=[1], works=["vit"], only=["plain", "fabric", "ours"], whole=False, anew=False,
        out=str(place / "found"),
    )  # fmt: skip
    measured = []

    def measure(name, work, drawn, place, ranks):
        if len(measured) == 4:
            measured.append(None)
            raise KeyboardInterrupt
        measured.append(name)
        if name == "fabric":
            return {"failure": "RuntimeError: broken"}
        seconds = {"plain": 3.0, "ours": 2.0}[name]
        return {"samples_per_second": work.batch / seconds, "seconds": seconds, "peak_gb": 1.0, "padding": None}

    monkeypatch.setattr(throughput, "measure", measure)
    monkeypatch.setattr(throughput, "draw", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        throughput.run(asked)
    throughput.run(asked)
    assert sorted(filter(None, measured)) == ["fabric"] * 2 + ["ours"] * 2 + ["plain"] * 2
    rows = [line.split("|")[2:5] for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["plain PyTorch loop", "2.67", "1.00"],
        ["Fabric", "failed", "–"],
        ["ours", "4.00", "1.50"],
    ]
    throughput.run(Namespace(**vars(asked) | {"rounds": 1}))  # other settings: from the beginning
    assert len(measured) == 7 + 3
