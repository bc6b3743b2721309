import json
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trainer.checkpoint.export import load_model, load_weights, save_model
from trainer.contract import Model
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


def same(first, second):
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# --------------------------------------------------------------------------------------------- export


def test_a_saved_model_comes_back_bit_for_bit_and_still_tied(tmp_path):
    model, module = TiedModel(), Tied()
    save_model(model, module, tmp_path)
    loaded = load_model(model, tmp_path)
    assert same(module, loaded)
    assert loaded.head.weight is loaded.embedding.weight
    assert names_in(tmp_path) == ["config.json", "files.json", "model.safetensors"]
    assert sorted(load_file(tmp_path / "model.safetensors")) == [
        "count",
        "embedding.weight",
        "lower",
        "turned",
        "upper",
    ]


def test_the_configuration_holds_the_fields_that_are_json(tmp_path):
    save_model(TiedModel(class_names=["cat", "dog"]), Tied(), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text(), parse_constant=pytest.fail)
    assert content["class"].endswith("TiedModel")
    assert content["fields"] == {"width": 4, "rates": [0.1, 0.2], "class_names": ["cat", "dog"]}


@dataclass
class OwnFormat(Model):
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


def test_weights_of_another_model_are_refused_naming_file_and_keys(tmp_path):
    save_model(TiedModel(), Tied(), tmp_path)
    with pytest.raises(
        RecipeError, match=r"model\.safetensors .*of another shape: turned \(4, 3\) instead of \(8, 3\), .* and 1 more"
    ):
        load_model(TiedModel(width=8), tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({f"other.{i}": torch.zeros(1) for i in range(5)}, path)
    with pytest.raises(RecipeError) as error:
        load_model(TiedModel(), tmp_path)
    assert str(path) in str(error.value)
    assert "missing: turned, upper, lower and 3 more" in str(error.value)
    assert "unexpected: other.0, other.1, other.2 and 2 more" in str(error.value)


def test_a_refused_file_leaves_the_module_as_it_was(tmp_path):
    module, path = Tied(), tmp_path / "partial.safetensors"
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    save_file({"embedding.weight": torch.zeros(10, 4)}, path)
    with pytest.raises(RecipeError, match="missing: "):
        load_weights(module, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_a_truncated_safetensors_file_is_named(tmp_path, kept):
    save_model(TiedModel(), Tied(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RecipeError, match=r"model\.safetensors is corrupt"):
        load_model(TiedModel(), tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"model\.safetensors is not there"):
        load_model(TiedModel(), tmp_path)


# ---------------------------------------------------------------------------- weights of other people


@pytest.mark.parametrize("name", ["w.pth", "w.pt", "w.bin", "w.safetensors"])
@pytest.mark.parametrize("zipped", [True, False])
def test_every_format_of_weights_is_read(tmp_path, name, zipped):
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(4)}
    if name.endswith(".safetensors"):
        save_file(tensors, tmp_path / name)
    else:
        torch.save(tensors, tmp_path / name, _use_new_zipfile_serialization=zipped)
    found = read_weights(tmp_path / name)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)


class Trap:
    """Unpickling this runs a command of its author's."""

    def __init__(self, victim):
        self.victim = str(victim)

    def __reduce__(self):
        return os.mkdir, (self.victim,)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run_it(tmp_path):
    torch.save({"a": Trap(tmp_path / "victim")}, tmp_path / "w.pth")
    with pytest.raises(RecipeError, match=r"w\.pth cannot be read safely"):
        read_weights(tmp_path / "w.pth")
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_pickle_is_named(tmp_path, zipped):
    path = tmp_path / "w.pth"
    torch.save({"a": torch.randn(300)}, path, _use_new_zipfile_serialization=zipped)
    for kept in (0, 10, len(path.read_bytes()) // 2):
        cut = tmp_path / f"cut{kept}.pth"
        cut.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(RecipeError, match=rf"cut{kept}\.pth cannot be read safely"):
            read_weights(cut)


def test_more_than_tensors_is_refused_naming_it(tmp_path):
    torch.save({"epoch": 3, "model": {"a": torch.zeros(1)}}, tmp_path / "w.pth")
    with pytest.raises(RecipeError, match=r"w\.pth holds more than tensors: epoch \(int\), model \(dict\)"):
        read_weights(tmp_path / "w.pth")
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    with pytest.raises(RecipeError, match=r"list\.pth holds a list"):
        read_weights(tmp_path / "list.pth")
    (tmp_path / "w.h5").touch()
    with pytest.raises(RecipeError, match=r"w\.h5 is not a weight file"):
        read_weights(tmp_path / "w.h5")


# -------------------------------------------------------------------------------------- atomic writes


def test_a_written_file_is_whole_and_readable_by_whom_the_umask_allows(tmp_path):
    write_atomic(tmp_path / "new" / "file", "é\n")
    write_atomic(tmp_path / "new" / "file", b"\x00")
    assert (tmp_path / "new" / "file").read_bytes() == b"\x00"
    (tmp_path / "plain").touch()
    assert (tmp_path / "new" / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert names_in(tmp_path / "new") == ["file"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_dies_leaves_the_old_file(tmp_path, monkeypatch, broken):
    write_atomic(tmp_path / "file", "old")
    monkeypatch.setattr(store.os, broken, die)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert names_in(tmp_path) == ["file"]


def die(*args, **kwargs):
    raise OSError("disk full")


def test_a_staged_folder_replaces_the_old_one_as_a_whole(tmp_path):
    for content in ("old", "new"):
        with staged_folder(tmp_path / "model") as part:
            (part / "deep").mkdir()
            (part / "deep" / content).write_text(content)
            assert content == "old" or (tmp_path / "model" / "deep" / "old").exists()
    assert names_in(tmp_path / "model" / "deep") == ["new"]
    assert names_in(tmp_path) == ["model"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_folder(tmp_path, error):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()

    def fail_half_way():
        with staged_folder(target) as part:
            (part / "half").touch()
            raise error

    with pytest.raises(error):
        fail_half_way()
    assert names_in(target) == ["old"]
    assert names_in(tmp_path) == ["model"]


def test_a_folder_that_cannot_take_its_place_gives_the_old_one_back(tmp_path, monkeypatch):
    target, rename = tmp_path / "model", os.rename
    target.mkdir()
    (target / "old").touch()

    def rename_but_not_the_new_one(source, destination):
        if str(source).endswith(".part"):
            die()
        rename(source, destination)

    monkeypatch.setattr(store.os, "rename", rename_but_not_the_new_one)
    with pytest.raises(OSError, match="disk full"), staged_folder(target) as part:
        (part / "new").touch()
    assert names_in(target) == ["old"]
    assert names_in(tmp_path) == ["model"]
