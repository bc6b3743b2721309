"""Models in files: saved, read back, and files of other people's; whole or not at all."""

import json
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trainer.checkpoint.export import load_model, load_weights, save_model
from trainer.contract import Exportable, Model
from trainer.errors import RecipeError
from trainer.system import files as store
from trainer.system.files import staged_folder, write_atomic
from trainer.weights.files import read_weights


class Tied(nn.Module):
    """Tied embeddings, a tensor that is not contiguous, two views of one storage, a buffer: what real models have."""

    def __init__(self, width=4):
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = nn.Parameter(torch.randn(3, width).t())
        both = torch.randn(2, width)
        self.upper, self.lower = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.register_buffer("count", torch.tensor(3))


@dataclass
class TiedModel(Model):
    width: int = 4
    rates: tuple[float, ...] = (0.1, 0.2)
    secret: Any = field(default_factory=object)
    limit: float = float("nan")
    class_names: list[str] | None = None

    def build(self):
        return Tied(self.width)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_model_comes_back_bit_for_bit_and_still_tied(tmp_path):
    model, module = TiedModel(class_names=["cat", "dog"]), Tied()
    save_model(model, module, tmp_path)
    loaded = load_model(model, tmp_path)
    before, after = module.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert loaded.head.weight is loaded.embedding.weight
    assert names_in(tmp_path) == ["config.json", "files.json", "model.safetensors"]
    names = ["count", "embedding.weight", "lower", "turned", "upper"]
    assert sorted(load_file(tmp_path / "model.safetensors")) == names
    content = json.loads((tmp_path / "config.json").read_text(), parse_constant=pytest.fail)
    assert content["class"].endswith("TiedModel")
    assert content["fields"] == {"width": 4, "rates": [0.1, 0.2], "class_names": ["cat", "dog"]}  # what is JSON


@dataclass
class OwnFormat(Exportable):
    own_format: ClassVar[bool] = True
    start: float = 0.0

    def build(self):
        module = nn.Linear(1, 1)
        nn.init.constant_(module.weight, self.start)
        return module

    def save(self, module, folder, state):
        (folder / "own.txt").write_text(str(module.weight.item()))

    def saved_in(self, folder):
        return OwnFormat(start=float((folder / "own.txt").read_text()))


def test_a_model_with_a_format_of_its_own_is_kept_in_it(tmp_path):
    save_model(OwnFormat(), OwnFormat(start=0.5).build(), tmp_path)
    assert names_in(tmp_path) == ["files.json", "own.txt"]
    assert load_model(OwnFormat(), tmp_path).weight.item() == 0.5


def test_weights_of_another_model_are_refused_naming_file_and_keys_and_change_nothing(tmp_path):
    save_model(TiedModel(), Tied(), tmp_path)
    message = r"model\.safetensors .*of another shape: turned \(4, 3\) instead of \(8, 3\), .* and 1 more"
    with pytest.raises(RecipeError, match=message):
        load_model(TiedModel(width=8), tmp_path)
    module, path = Tied(), tmp_path / "model.safetensors"
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    save_file({"embedding.weight": torch.zeros(10, 4)} | {f"other.{i}": torch.zeros(1) for i in range(5)}, path)
    with pytest.raises(RecipeError) as error:
        load_weights(module, path)
    assert str(path) in str(error.value)
    assert "missing: turned, upper, lower and 1 more" in str(error.value)
    assert "unexpected: other.0, other.1, other.2 and 2 more" in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("kept", [None, 0, 5, 60, -1])
def test_a_missing_or_truncated_safetensors_file_is_named(tmp_path, kept):
    save_model(TiedModel(), Tied(), tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    if kept is not None:
        path.write_bytes(content[:kept])
    with pytest.raises(RecipeError, match=rf"model\.safetensors {'does not exist' if kept is None else 'is corrupt'}"):
        load_model(TiedModel(), tmp_path)


# Weights of other people.


@pytest.mark.parametrize("name", ["w.pth", "w.pt", "w.bin", "w.safetensors"])
@pytest.mark.parametrize("zipped", [True, False])
def test_every_format_of_weights_is_read_and_a_truncated_pickle_is_named(tmp_path, name, zipped):
    tensors, path = {"a": torch.randn(300), "b": torch.arange(4)}, tmp_path / name
    if name.endswith(".safetensors"):
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    found = read_weights(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    content = path.read_bytes()
    for kept in () if name.endswith(".safetensors") else (0, 10, len(content) // 2):
        path.write_bytes(content[:kept])
        with pytest.raises(RecipeError, match=rf"{name} cannot be read safely"):
            read_weights(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.pth", {"epoch": 3, "model": {}}, r"w\.pth contains more than tensors, epoch \(int\), model \(dict\)"),
        ("w.pth", [], r"w\.pth contains a list"),
        ("w.h5", {}, r"w\.h5 is not a weight file"),
    ],
)
def test_more_than_tensors_is_refused_naming_it(tmp_path, name, content, message):
    torch.save(content, tmp_path / name)
    with pytest.raises(RecipeError, match=message):
        read_weights(tmp_path / name)


# Atomic writes.


def test_a_written_file_is_whole_and_readable_by_whom_the_umask_allows(tmp_path):
    write_atomic(tmp_path / "new" / "file", "é\n")
    write_atomic(tmp_path / "new" / "file", b"\x00")
    assert (tmp_path / "new" / "file").read_bytes() == b"\x00"
    (tmp_path / "plain").touch()
    assert (tmp_path / "new" / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert names_in(tmp_path / "new") == ["file"]


def die(*args, **kwargs):
    raise OSError("disk full")


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_dies_leaves_the_old_file(tmp_path, monkeypatch, broken):
    write_atomic(tmp_path / "file", "old")
    monkeypatch.setattr(store.os, broken, die)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert names_in(tmp_path) == ["file"]


def test_a_staged_folder_replaces_the_old_one_as_a_whole(tmp_path):
    for content in ("old", "new"):
        with staged_folder(tmp_path / "model") as part:
            (part / "deep").mkdir()
            (part / "deep" / content).write_text(content)
            assert content == "old" or (tmp_path / "model" / "deep" / "old").exists()
    assert names_in(tmp_path / "model" / "deep") == ["new"]
    assert names_in(tmp_path) == ["model"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_a_folder_that_cannot_be_filled_or_take_its_place_leaves_the_old_one(tmp_path, monkeypatch, error):
    target, rename = tmp_path / "model", os.rename
    target.mkdir()
    (target / "old").touch()
    monkeypatch.setattr(store.os, "rename", lambda old, new: die() if str(old).endswith(".part") else rename(old, new))

    def fill():
        with staged_folder(target) as part:
            (part / "half").touch()
            if error is not OSError:  # which comes when the new one is renamed
                raise error

    with pytest.raises(error):
        fill()
    assert names_in(target) == ["old"]
    assert names_in(tmp_path) == ["model"]
