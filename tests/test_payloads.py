"""A corpus of files that execute code when loaded carelessly, through every way by which a file can be named to us."""

import json
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from helpers.payloads import (
    DEEP_JSON,
    LYING,
    PICKLES,
    Trap,
    code,
    edit_json,
    object_array,
    tar_with_links,
    write_npz,
    yaml_tags,
    zip_with_dots,
)
from helpers.problems import make_model
from PIL import Image
from safetensors.torch import save_file

from trainer.cli import run

RECIPE = """
from trainer import Memory, Recipe
from trainer.data import {data}
from trainer.models import {model}

recipe = Recipe(model={model}({arguments}), data={data}("data"), batch_size=2, memory=Memory(micro_batch_size=2))
"""
SMALL = ["fit", "vit_digits", "--model.layers=1", "--model.width=8", "--model.mlp_width=8", "--max_steps=1"]


@pytest.fixture
def marker(tmp_path):
    """What a payload makes when it is executed."""
    path = tmp_path / "executed"
    yield path
    assert not path.exists()


@pytest.fixture
def refused(marker, capsys, tmp_path, monkeypatch):
    """A function: run a command line, which must be refused in one line that has all of ``parts`` in it."""
    monkeypatch.chdir(tmp_path)

    def check(*words, parts=()):
        capsys.readouterr()
        assert run([str(word) for word in words]) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("trainer: error: ")
        for part in parts:
            assert str(part) in line
        assert not marker.exists()

    return check


def own_recipe(folder, data, model, arguments):
    path = folder / "own.py"
    path.write_text(RECIPE.format(data=data, model=model, arguments=arguments))
    return path


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("name", PICKLES)
def test_pickled_weights_are_refused_and_would_execute(refused, marker, tmp_path, name):
    PICKLES[name](tmp_path / name, marker)
    refused("fit", "vit_digits", "--model.weights", tmp_path / name, parts=[name])
    with suppress(RuntimeError, TypeError, AttributeError, pickle.UnpicklingError):  # after it was executed
        torch.load(tmp_path / name, weights_only=False)
    marker.rmdir()  # it is there: else this would show nothing


def test_weights_of_other_kinds_are_refused(refused, marker, tmp_path):
    (tmp_path / "dcp").mkdir()
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pt")
    for name in ("model.ckpt", "model.pkl", "model.joblib", "dcp/.metadata", "dcp/x.distcp", "dcp", "script.pt"):
        if name not in ("dcp", "script.pt"):
            (tmp_path / name).write_bytes(pickle.dumps(Trap(marker)))
        refused("fit", "vit_digits", "--model.weights", tmp_path / name, parts=[name])


@pytest.mark.parametrize("name", LYING)
@pytest.mark.parametrize("init", ["device", "meta"])
def test_safetensors_that_lie_are_refused(refused, tmp_path, name, init):
    path = tmp_path / "w.safetensors"
    path.write_bytes(LYING[name])
    refused("fit", "vit_digits", "--model.weights", path, "--memory.init", init, parts=["w.safetensors"])


# -------------------------------------------------------------------------------------------- text models


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = make_model("distilbert")
    module = model.build()
    model.save(module, folder, module.state_dict())
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A text model, to put payloads in."""
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def flags(folder, tmp_path):
    (tmp_path / "reviews").mkdir()
    for part in ("train", "test"):
        (tmp_path / "reviews" / f"{part}.csv").write_text("text,label\nw2 w3,0\nw4,1\n")
    own = [f"--model.{key}={folder}" for key in ("name", "weights", "tokenizer")]
    rest = [f"--data.root={tmp_path / 'reviews'}", "--data.max_length=16", f"--data.cache_dir={tmp_path / 'cache'}"]
    return ["distilbert_imdb", *own, *rest, "--memory.precision=32-true", "--max_steps=1", "--batch_size=2"]


def pickled_instead(folder, marker):
    (folder / "model.safetensors").unlink()
    torch.save(Trap(marker), folder / "pytorch_model.bin")


def index_of_pickles(folder, marker):
    pickled_instead(folder, marker)
    names = {"a": "pytorch_model.bin", "b": "../model/pytorch_model.bin"}
    edit_json(folder / "model.safetensors.index.json", weight_map=names, metadata={})


def remote_model(folder, marker):
    (folder / "modelling.py").write_text(code(marker))
    edit_json(folder / "config.json", model_type="evil", auto_map=MODELLING)


def remote_tokenizer(folder, marker):
    (folder / "tokenizer.py").write_text(code(marker))
    edit_json(folder / "config.json", model_type="evil")
    names = {"AutoTokenizer": ["tokenizer.Evil", None]}
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map=names)


def adapter(folder, marker):
    edit_json(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="someone/else")
    torch.save(Trap(marker), folder / "adapter_model.bin")


def text(file, content):
    return lambda folder, marker: (folder / file).write_text(content)


def config(file="config.json", **changes):
    return lambda folder, marker: edit_json(folder / file, **changes)


MODELLING = {"AutoConfig": "modelling.Evil", "AutoModelForSequenceClassification": "modelling.Evil"}
FOLDERS = {
    "pickled instead": (pickled_instead, "weights"),
    "index of pickles": (index_of_pickles, "weights"),
    "code of the model": (remote_model, "remote code"),
    "code of the tokenizer": (remote_tokenizer, "remote code"),
    "other's code": (config(model_type="evil", auto_map={"AutoConfig": "someone/else--modelling.Evil"}), "remote code"),
    "adapter": (adapter, "PEFT adapter"),
    "kernel": (config(attn_implementation="someone/kernel"), "kernel"),
    "quantised": (config(quantization_config={"quant_method": "x"}), "quant"),
    "deep configuration": (text("config.json", DEEP_JSON), "model"),
    "deep tokenizer": (text("tokenizer.json", DEEP_JSON), "tokenizer"),
    "deep settings of the tokenizer": (text("tokenizer_config.json", DEEP_JSON), "tokenizer"),
    "a list for a configuration": (text("config.json", "[1]"), "model"),
    "a number for a type": (config(model_type=3), "model"),
    "a negative size": (config(dim=-5), "model"),
    "a word for a size": (config(dim="x"), "model"),
    "odd map": (config("tokenizer_config.json", auto_map=7), "tokenizer"),
    "pickled tokenizer": (lambda f, m: (f / "tokenizer.json").write_bytes(pickle.dumps(Trap(m))), "tokenizer"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_with_code_is_refused(refused, marker, folder, flags, name):
    spoil, part = FOLDERS[name]
    spoil(folder, marker)
    refused("fit", *flags, parts=[folder, part])


def test_an_index_that_leads_elsewhere_is_refused(refused, folder, flags):
    (folder / "model.safetensors").rename(folder.parent / "w.safetensors")
    edit_json(folder / "model.safetensors.index.json", weight_map={"a": "../w.safetensors"})
    refused("fit", *flags, "--memory.init=meta", parts=["index.json", "'../w.safetensors'", "same folder"])


def test_code_that_nothing_needs_is_not_executed(marker, folder, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file in ("__init__.py", "modelling.py", "tokenizer.py", "custom_generate.py", "setup.py", "conftest.py"):
        (folder / file).write_text(code(marker))
    edit_json(folder / "config.json", auto_map=MODELLING)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenizer.Evil", "tokenizer.Evil"]})
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    for file in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth"):
        torch.save(Trap(marker), folder / file)
    assert run(["fit", *flags, f"--run.dir={tmp_path / 'run'}"]) == 0, capsys.readouterr().err
    shutil.copy(folder / "modelling.py", tmp_path / "run" / "model")
    assert run(["predict", str(tmp_path / "run"), "--text", "w2"]) == 0, capsys.readouterr().err


def test_an_entry_of_a_configuration_constructs_nothing(refused, marker, flags):
    entry = json.dumps({"class_path": "os.mkdir", "init_args": [str(marker)]})
    refused("fit", *flags, "--model.config", entry, parts=["class_path"])


# --------------------------------------------------------------------------------------------------- YAML


@pytest.mark.parametrize("name", yaml_tags(Path()))
def test_yaml_that_constructs_is_refused(refused, marker, tmp_path, name):
    path, content = tmp_path / "own.yaml", yaml_tags(marker)[name]
    path.write_text(content)
    refused("fit", "vit_digits", "--config", path, parts=["own.yaml"])
    path.write_text("recipe: vit_digits\n" + content)
    refused("plan", path, parts=["own.yaml"])
    (tmp_path / "run" / "model").mkdir(parents=True)
    path.rename(tmp_path / "run" / "recipe.yaml")
    refused("evaluate", tmp_path / "run", parts=["recipe.yaml"])
    if name in ("apply", "new", "apply with state"):  # it would execute, or else this would show nothing
        with suppress(yaml.YAMLError):  # after it was executed
            yaml.unsafe_load(content)
        marker.rmdir()


# --------------------------------------------------------------------------------------------------- data


def test_arrays_with_objects_are_refused(refused, marker, tmp_path):
    path = tmp_path / "cifar.npz"
    odd = [{key: object_array(marker)} for key in ("images", "labels", "split", "class_names")]
    odd += [{"labels": np.array(["a"] * 4)}, {"split": np.zeros((4, 2))}, {"class_names": np.array(3)}, None]
    for arrays in odd:
        write_npz(path, **arrays) if arrays else path.write_bytes(pickle.dumps(Trap(marker)))
        refused("fit", "vit_cifar10", "--model.weights", "null", "--data.root", path, parts=["cifar.npz"])


def test_changed_batches_of_cifar10_are_refused_unread(refused, marker, tmp_path):
    from torchvision.datasets import CIFAR10

    (tmp_path / CIFAR10.base_folder).mkdir()
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], "")]:
        (tmp_path / CIFAR10.base_folder / name).write_bytes(pickle.dumps(Trap(marker)))
    flags = ["--model.weights", "null", "--data.download", "false", "--data.root", tmp_path]
    refused("fit", "vit_cifar10", *flags, parts=[CIFAR10.base_folder])


def test_processed_files_of_fashion_mnist_are_refused(refused, marker, tmp_path):
    processed = tmp_path / "FashionMNIST" / "processed"
    processed.mkdir(parents=True)
    for content in (Trap(marker), ("a", "b"), (torch.zeros(2), None), (torch.zeros(3), 1)):
        for name in ("training.pt", "test.pt"):
            torch.save(content, processed / name)
        flags = ["--data.download", "false", "--data.root", tmp_path]
        refused("fit", "mlp_fashion_mnist", *flags, parts=["FashionMNIST"])


@pytest.fixture
def table(refused, tmp_path):
    """A function: refuse a table to train on, naming ``parts``."""
    recipe = own_recipe(tmp_path, "TextFiles", "TextClassifier", '"distilbert"')
    flags = ["--model.tokenizer", make_model("distilbert").tokenizer, "--data.cache_dir", tmp_path / "cache"]

    def check(path, *parts):
        refused("fit", recipe, *flags, "--data.train_file", path, parts=[path.name, *parts])

    return check


def test_archives_are_not_unpacked(table, tmp_path):
    for pack, name in ((tar_with_links, "a.csv"), (zip_with_dots, "a.jsonl"), (zip_with_dots, "a.parquet")):
        pack(tmp_path / name, tmp_path / "outside.txt")
        table(tmp_path / name, "unpack")
        assert not list(tmp_path.parent.rglob("outside.txt"))


def test_odd_tables_are_refused(table, marker, tmp_path):
    pickled = pickle.dumps(Trap(marker))
    odd = {"nul.csv": b"text,label\n\0\0,1\n" + pickled, "script.py": code(marker).encode()}
    odd |= {f"pickle.{kind}": pickled for kind in ("csv", "jsonl", "parquet")}
    for name, content in odd.items():
        (tmp_path / name).write_bytes(content)
        table(tmp_path / name)
    (tmp_path / "deep.jsonl").write_text('{"text":' + DEEP_JSON + ', "label": 1}\n')
    table(tmp_path / "deep.jsonl", "line 1: ")
    # A pickle in the schema of a table is not read.
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickled}
    fields = [pyarrow.field("text", pyarrow.string(), metadata=extension), pyarrow.field("label", pyarrow.int64())]
    rows = pyarrow.table([["w2", ""], [0, 1]], schema=pyarrow.schema(fields))
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    table(tmp_path / "a.parquet", "a.parquet row 2")


def test_scripts_for_loading_are_refused(refused, marker, tmp_path, flags):
    (tmp_path / "scripts").mkdir()
    for name in ("evil.py", "scripts.py"):
        (tmp_path / "scripts" / name).write_text(code(marker))
    for root in ("scripts/evil.py", "scripts", tmp_path / "scripts"):
        refused("fit", *flags, "--data.root", root, parts=["data.root", root])


@pytest.fixture
def images(tmp_path, marker, monkeypatch):
    """A folder of images, and a Ghostscript that tells when it is started."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\nmkdir '{marker}'\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "data" / part / name / "0.png")
    return tmp_path / "data"


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(x) print showpage\n%%EOF\n"


def test_images_of_other_formats_start_no_program(refused, marker, images, tmp_path):
    arguments = '"custom", patch_size=4, layers=1, heads=1, width=8, mlp_width=8'
    recipe = own_recipe(tmp_path, "ImageFolder", "VisionTransformer", arguments)
    odd = {
        "eps.png": POSTSCRIPT,
        "svg.jpg": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
        "pickle.webp": pickle.dumps(Trap(marker)),
        "cut.tiff": b"II*\0\xff\xff\xff\xff",
        "wmf.bmp": b"\xd7\xcd\xc6\x9a\0\0" + b"\0" * 50,
    }
    for name, content in odd.items():
        path = images / "train" / "a" / name
        path.write_bytes(content)
        refused("fit", recipe, "--data.root", images, "--data.image_size=8", parts=[name])
        path.unlink()


def test_pictures_to_classify_start_no_program(refused, images, tmp_path):
    run_dir, picture = tmp_path / "run", images / "train" / "a" / "0.png"
    assert run([*SMALL, "--run.evaluate=false", f"--run.dir={run_dir}"]) == 0
    (tmp_path / "eps.png").write_bytes(POSTSCRIPT)
    refused("predict", run_dir, "--image", tmp_path / "eps.png", parts=["eps.png"])
    weights = run_dir / "model" / "model.safetensors"
    PICKLES["zip.pth"](weights, tmp_path / "executed")
    for words in (["predict", str(run_dir), "--image", str(picture)], ["evaluate", str(run_dir)]):
        assert run(words) == 1  # it is not what the run has written
    (run_dir / "model" / "files.json").unlink()
    refused("predict", run_dir, "--image", picture, parts=["model.safetensors"])
    refused("evaluate", run_dir, parts=["model.safetensors"])
    weights.unlink()
    save_file({"a": torch.zeros(2)}, weights)
    refused("evaluate", run_dir, parts=["model.safetensors", "does not fit"])
