"""Predictions of before: given again when nothing has changed, and never otherwise."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer.commands.recipes import load_recipe
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.memory.plan import decide_plan
from trainer.planner import kept
from trainer.planner.kept import AGAIN, Keeper
from trainer.planner.predict import predict_here, prepared
from trainer.settings import change
from trainer.system.children import in_child, in_children
from trainer.weights.streaming import on_meta

ANSWER = {"reserved": 7, "notes": []}
LATER = 10**10
"""Nanoseconds by which a keeper's process begins in the future: files that a test writes are old enough for it."""


class Net(nn.Module):
    """With whatever a module may be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(4, 3), nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.register_buffer("ids", torch.arange(3), persistent=False)  # two names in a set
        self.options: dict[str, Any] = {"act": "gelu", "names": {"a", "b", "c"}}


class Asked:
    """What a prediction is asked for; every part may be changed."""

    def __init__(self) -> None:
        self.recipe = change(load_recipe("vit_digits")[0], {"batch_size": 4, "memory.micro_batch_size": 2}, {})
        self.plan = decide_plan(self.recipe, 1)
        self.target = Target(gpu_named("a100-80gb"))
        self.samples: Any = {"images": torch.zeros(2, 3), "labels": torch.arange(2)}
        self.nodes, self.module = 1, on_meta(Net)

    def note(self, root: Path, since: int = 0) -> kept.Note:
        keeper = Keeper(root, since or time.time_ns() + LATER)
        return kept.Note(keeper, self.recipe, self.plan, self.samples, self.target, self.nodes)

    def known(self, root: Path) -> bool:
        return answer_of(self.note(root), self.module) is not None

    def keep(self, root: Path) -> Path:
        note = self.note(root)
        answer_of(note, self.module)
        note.write(ANSWER)
        return note.path


def answer_of(note: kept.Note, module: nn.Module) -> dict[str, Any] | None:
    try:
        note.look(module)
    except kept.Known as known:
        return known.answer
    return None


@pytest.fixture(scope="module", autouse=True)
def everything_is_loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the first entry loads would be in the key of the second one, of the same process, whose program has a file.

    That of a worker of xdist has none.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(sys.modules["__main__"], "__file__", pytest.__file__, raising=False)
    assert Asked().keep(tmp_path_factory.mktemp("first")).exists()
    yield
    patch.undo()


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of libraries, thousands in a process of the tests, are not looked at: where files are not what changes."""
    own, files = str(Path(kept.__file__).parents[1]), kept._files
    monkeypatch.setattr(kept, "_files", lambda: {path for path in files() if path.startswith(own)})


quick = pytest.mark.usefixtures("few_files")


def replaced(part: str, **values: Any) -> Callable[[Asked], None]:
    return lambda asked: setattr(asked, part, dataclasses.replace(getattr(asked, part), **values))


def of_module(action: Callable[[Net], Any]) -> Callable[[Asked], None]:
    return lambda asked: action(asked.module)


CHANGES: dict[str, Callable[[Asked], Any]] = {
    "a setting": lambda asked: setattr(asked, "recipe", change(asked.recipe, {"optim.lr": 0.5}, {})),
    "a setting of the model": lambda asked: setattr(asked, "recipe", change(asked.recipe, {"model.dropout": 0.3}, {})),
    "the plan": replaced("plan", world_size=2),
    "the card": replaced("target", gpu=gpu_named("rtx-4090")),
    "the card's memory": replaced("target", gpu=dataclasses.replace(gpu_named("a100-80gb"), memory=1)),
    "the allocator": replaced("target", expandable_segments=True),
    "torch that is planned for": replaced("target", torch_version=(2, 12)),
    "nodes": lambda asked: setattr(asked, "nodes", 2),
    "a shape of the samples": lambda asked: asked.samples.update(images=torch.zeros(2, 4)),
    "a type of the samples": lambda asked: asked.samples.update(images=torch.zeros(2, 3, dtype=torch.float64)),
    "a value of the samples": lambda asked: asked.samples.update(labels=torch.tensor([0, 2])),
    "a parameter's shape": of_module(lambda net: setattr(net, "first", nn.Linear(4, 5))),
    "a parameter's type": of_module(lambda net: net.first.half()),
    "a parameter's name": of_module(lambda net: setattr(net, "second", net._modules.pop("first"))),
    "a tied parameter": of_module(lambda net: setattr(net.first, "bias", net.first.weight)),
    "what is trained": of_module(lambda net: net.first.weight.requires_grad_(False)),
    "a layer's class": of_module(lambda net: setattr(net, "drop", nn.Dropout1d(0.1))),
    "a layer's setting": of_module(lambda net: setattr(net.drop, "p", 0.2)),
    "an attribute": of_module(lambda net: net.options.update(act="relu")),
    "an element of a set": of_module(lambda net: net.options["names"].add("d")),
    "a buffer": of_module(lambda net: net.scale.mul_(2)),
    "evaluation": of_module(nn.Module.eval),
}


@quick
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_is_asked_for_misses(name, tmp_path):
    Asked().keep(tmp_path)
    assert Asked().known(tmp_path)
    asked = Asked()
    CHANGES[name](asked)
    assert not asked.known(tmp_path)


@quick
def test_a_change_of_the_surroundings_misses(tmp_path, monkeypatch):
    (tmp_path / "path").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "path")
    asked, root = Asked(), tmp_path / "plans"
    asked.keep(root)
    changes = [
        lambda patch: patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
        lambda patch: patch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1"),
        lambda patch: patch.setenv("OF_A_MODEL_OF_MY_OWN", "1"),
        lambda patch: patch.setattr(torch, "__version__", "2.16.0"),
        lambda patch: patch.setattr(torch, "get_float32_matmul_precision", lambda: "high"),
        lambda patch: patch.chdir(tmp_path),
        lambda patch: (tmp_path / "path" / "flash_attn-2.8.dist-info").mkdir(),  # stays: the last
    ]
    for one in changes:
        assert asked.known(root)
        with monkeypatch.context() as patch:
            one(patch)
            assert not asked.known(root)
    monkeypatch.setenv("SHLVL", "7")  # where a command was typed does not matter
    (tmp_path / "path" / "flash_attn-2.8.dist-info").rmdir()
    assert asked.known(root)


def test_a_change_of_a_file_misses_whether_it_was_loaded_before_or_while_tracing(tmp_path, monkeypatch):
    for name in ("own_net", "own_later"):
        (tmp_path / f"{name}.py").write_text("WIDTH = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    asked, root = Asked(), tmp_path / "plans"
    importlib.import_module("own_net")
    note = asked.note(root)
    answer_of(note, asked.module)
    importlib.import_module("own_later")
    note.write(ANSWER)
    monkeypatch.delitem(sys.modules, "own_later")
    before = os.stat(tmp_path / "own_net.py")
    for name in ("own_later", "own_net"):
        assert asked.known(root)
        (tmp_path / f"{name}.py").write_text("WIDTH = 2\n")  # as long as before, and of the same time
        os.utime(tmp_path / f"{name}.py", ns=(before.st_atime_ns, before.st_mtime_ns))
        assert not asked.known(root)
        asked.keep(root)
    began = os.stat(tmp_path / "own_net.py").st_ctime_ns + 1
    assert answer_of(asked.note(root, since=began), asked.module) is None  # changed just before this process began


def test_what_cannot_be_described_is_not_kept(tmp_path, monkeypatch):
    local, typed, keeper = Asked(), Asked(), Keeper(tmp_path, time.time_ns() + LATER)
    local.module.options["act"] = lambda values: values
    note = kept.Note(keeper, local.recipe)
    assert answer_of(note, local.module) is None
    note.write(ANSWER)
    monkeypatch.delattr(sys.modules["__main__"], "__file__")  # as in a notebook
    note = typed.note(tmp_path)
    assert answer_of(note, typed.module) is None
    note.write(ANSWER)
    assert list(tmp_path.iterdir()) == []


@quick
def test_a_damaged_entry_is_a_miss_and_is_replaced(tmp_path):
    asked = Asked()
    path = asked.keep(tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole.replace(b"7", b"8"), b"[" * 100_000, b"{}", b"null"):
        path.write_bytes(damaged)
        assert not asked.known(tmp_path)
        asked.keep(tmp_path)
        assert asked.known(tmp_path)
    other = Asked()
    other.nodes = 2
    path.replace(other.keep(tmp_path))  # under the name of another
    assert not other.known(tmp_path)
    path.mkdir()
    assert not asked.known(tmp_path)
    asked.keep(tmp_path)  # which cannot be, and nobody is told
    assert not asked.known(tmp_path)


def hammered(root: Path) -> list[bool]:
    """Read and write one entry again and again; whether each reading saw nothing, or all of it."""
    asked, seen = Asked(), []
    for _ in range(5):
        note = asked.note(root)
        answer = answer_of(note, asked.module)
        seen.append(answer is None or answer == {**ANSWER, "notes": [AGAIN], "retries": 0})
        note.write(ANSWER)
    return seen


@quick
def test_processes_at_once_see_whole_entries(tmp_path):
    results = [result for _, result in in_children([partial(hammered, tmp_path)] * 3, at_once=3)]
    assert results == [[True] * 5] * 3
    (only,) = tmp_path.iterdir()
    assert json.loads(only.read_text())["found"]["answer"] == ANSWER


@quick
def test_what_was_used_longest_ago_goes_first(tmp_path, monkeypatch):
    entries = []
    for nodes in (1, 2, 3):
        asked = Asked()
        asked.nodes = nodes
        entries.append((asked, path := asked.keep(tmp_path)))
        os.utime(path, ns=(nodes, nodes))
    assert entries[0][0].known(tmp_path)  # used again
    size = entries[0][1].stat().st_size
    monkeypatch.setattr(kept, "MOST_BYTES", 2 * size)
    (tmp_path / "thesis.json").write_bytes(bytes(3 * size))  # a folder of the user's, by mistake: the oldest in it
    (tmp_path / f"{'a' * 64}.json").mkdir()
    for name in ("thesis.json", f"{'a' * 64}.json"):
        os.utime(tmp_path / name, ns=(0, 0))
    entries[2][0].keep(tmp_path)
    assert [asked.known(tmp_path) for asked, _ in entries] == [True, False, True]
    assert (tmp_path / "thesis.json").stat().st_size == 3 * size
    assert (tmp_path / f"{'a' * 64}.json").is_dir()


def test_where_predictions_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINER_PLANS", "off")
    assert Keeper.here(0) is None
    monkeypatch.delenv("TRAINER_PLANS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Keeper.here(0) == Keeper(tmp_path / "trainer" / "plans", 0)


@pytest.mark.slow
def test_a_prediction_is_the_one_of_before_for_every_budget_but_where_the_allocator_must_be_asked(tmp_path):
    settings = {"model.layers": 1, "batch_size": 4, "memory.micro_batch_size": 2}
    recipe = prepared(change(load_recipe("vit_digits")[0], settings, {}))
    keeper = Keeper(tmp_path, time.time_ns() + LATER)

    def predicted(budget: str, capacity: int | None = None) -> dict[str, Any]:
        asked = change(recipe, {"memory.budget": budget}, {})
        plan, target = decide_plan(asked, 1), Target(gpu_named("a100-80gb"))
        return in_child(partial(predict_here, asked, plan, target, capacity=capacity, keeper=keeper))

    first = predicted("1GB")
    assert AGAIN not in first["notes"]
    again = predicted("2GB", 10**9)
    assert again == {**first, "retries": 0, "notes": [*first["notes"], AGAIN]}
    assert first["allocated"] < first["reserved"]
    between = predicted("2GB", first["reserved"] - 1)
    assert AGAIN not in between["notes"]
    assert predicted("2GB", first["allocated"] - 1)["retries"] is None


@pytest.mark.slow
def test_another_process_with_another_order_of_sets_is_given_the_same(tmp_path):
    """The command, from two fresh interpreters."""
    found = []
    for seed in ("1", "2"):
        words = ["plan", "vit_digits", "--gpu", "a100-80gb", "--json", "--out", str(tmp_path / seed)]
        environment = {**os.environ, "PYTHONHASHSEED": "random", "TRAINER_PLANS": str(tmp_path / "plans")}
        done = subprocess.run(
            [sys.executable, "-m", "trainer", *words], env=environment, capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout))
    assert [AGAIN in content["notes"] for content in found] == [False, True]
    assert found[0]["chosen"]["prediction"]["phases"] == found[1]["chosen"]["prediction"]["phases"]
    assert found[0]["command"] == found[1]["command"]
