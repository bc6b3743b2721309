"""Files that execute code when they are loaded carelessly, or are not what they say: refused by name, never executed.

A case is a function that makes files in the working directory, a command line that reads them, and the words that the
error must contain. ``HERE`` is the working directory; a payload that is executed makes the folder ``executed`` in it.
"""

import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from helpers import payloads
from helpers.payloads import Trap, at, content, edit_json, pickled, python
from helpers.problems import tokenizer_folder
from helpers.tiny import weights_of
from PIL import Image
from safetensors.torch import save_file
from torchvision.datasets import CIFAR10

from trainer.cli import run

Make = Callable[[Path, Path], object]
"""Makes files in a folder, or one at a path; the second argument is what a payload makes."""

SMALL = "vit_digits --model.layers=1 --model.width=8 --model.mlp_width=8 --run.evaluate=false --run.predict=false"


CASES = []


def add(kind: str, rows: dict[str, Make], command: str, *named: str, codes=(2,)) -> None:
    """Add a case for each row of a table; NAME stands for the name of the row."""
    for name, make in rows.items():
        words = [text.replace("NAME", name) for text in (command, *named)]
        CASES.append(pytest.param(make, words[0], words[1:], codes, id=f"{kind}: {name}"))


# Weights

WEIGHTS = payloads.PICKLES | dict.fromkeys(("model.ckpt", "model.pkl", "model.joblib", "dcp/x.distcp"), pickled)
WEIGHTS |= {"script.pt": lambda path, marker: torch.jit.script(torch.nn.Linear(2, 2)).save(path)}
FILES = {file: at(file, write) for file, write in WEIGHTS.items()}
FILES |= dict.fromkeys(("dcp", "dcp/.metadata"), at("dcp/.metadata", pickled))
LYING = {name: at("w.safetensors", content(lie)) for name, lie in payloads.LYING.items()}
add("weights", FILES, "fit vit_digits --model.weights NAME", "NAME")
add("safetensors", LYING, "fit vit_digits --model.weights w.safetensors", "w.safetensors")
add("meta", LYING, "fit vit_digits --model.weights w.safetensors --memory.init meta", "w.safetensors")


# Text models

TEXT = "fit distilbert_imdb --model.name=HERE/model --model.weights=HERE/model --model.tokenizer=HERE/model"
TEXT += " --data.root=HERE/reviews --data.max_length=16 --data.cache_dir=cache --memory.precision=32-true"
TEXT += " --max_steps=1 --batch_size=2"
MODELLING = {"AutoConfig": "modelling.Evil", "AutoModelForSequenceClassification": "modelling.Evil"}


def text_model(spoil: Make, folder: Path, marker: Path) -> Path:
    """Put payloads in a folder with a model, and two reviews beside it."""
    (folder / "reviews").mkdir()
    for part in ("train", "test"):
        (folder / "reviews" / f"{part}.csv").write_text("text,label\nw2 w3,0\nw4,1\n")
    shutil.copytree(weights_of("distilbert"), folder / "model")
    spoil(folder / "model", marker)
    return folder / "model"


def pickled_instead(folder, marker):
    (folder / "model.safetensors").unlink()
    torch.save(Trap(marker), folder / "pytorch_model.bin")


def index_of_pickles(folder, marker):
    pickled_instead(folder, marker)
    names = {"a": "pytorch_model.bin", "b": "../model/pytorch_model.bin"}
    edit_json(folder / "model.safetensors.index.json", weight_map=names, metadata={})


def index_that_leads_elsewhere(folder, marker):
    (folder / "model.safetensors").rename(folder.parent / "w.safetensors")
    edit_json(folder / "model.safetensors.index.json", weight_map={"a": "../w.safetensors"})


def remote_model(folder, marker):
    python(folder / "modelling.py", marker)
    edit_json(folder / "config.json", model_type="evil", auto_map=MODELLING)


def remote_tokenizer(folder, marker):
    python(folder / "tokenizer.py", marker)
    edit_json(folder / "config.json", model_type="evil")
    names = {"AutoTokenizer": ["tokenizer.Evil", None]}
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map=names)


def adapter(folder, marker):
    edit_json(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="someone/else")
    torch.save(Trap(marker), folder / "adapter_model.bin")


def config(file="config.json", **changes) -> Make:
    return lambda folder, marker: edit_json(folder / file, **changes)


FOLDERS = {
    "weights": {"pickled instead": pickled_instead, "index of pickles": index_of_pickles},
    "remote code": {
        "code of the model": remote_model,
        "code of the tokenizer": remote_tokenizer,
        "other's code": config(model_type="evil", auto_map={"AutoConfig": "someone/else--modelling.Evil"}),
    },
    "PEFT adapter": {"adapter": adapter},
    "kernel": {"kernel": config(attn_implementation="someone/kernel")},
    "quant": {"quantised": config(quantization_config={"quant_method": "x"})},
    "model": {
        "deep configuration": at("config.json", content(payloads.DEEP_JSON)),
        "a list for a configuration": at("config.json", content("[1]")),
        "a number for a type": config(model_type=3),
        "a negative size": config(dim=-5),
        "a word for a size": config(dim="x"),
    },
    "tokenizer": {
        "deep tokenizer": at("tokenizer.json", content(payloads.DEEP_JSON)),
        "deep settings": at("tokenizer_config.json", content(payloads.DEEP_JSON)),
        "odd map": config("tokenizer_config.json", auto_map=7),
        "pickled tokenizer": at("tokenizer.json", pickled),
    },
}
for words, spoilers in FOLDERS.items():
    rows = {name: partial(text_model, spoil) for name, spoil in spoilers.items()}
    add("text model", rows, TEXT, "HERE/model", words)
elsewhere = {"index that leads elsewhere": partial(text_model, index_that_leads_elsewhere)}
add("text model", elsewhere, f"{TEXT} --memory.init=meta", "index.json", "'../w.safetensors'", "same folder")
CLASS = '{"class_path":"os.mkdir","init_args":["HERE/executed"]}'
add("text model", {"a class": partial(text_model, config())}, f"{TEXT} --model.config {CLASS}", "class_path")


# YAML


def yaml_files(name: str, folder: Path, marker: Path) -> None:
    text = payloads.yaml_tags(marker)[name]
    (folder / "own.yaml").write_text(text)
    (folder / "run" / "model").mkdir(parents=True)
    for path in (folder / "plan.yaml", folder / "run" / "recipe.yaml"):
        path.write_text("recipe: vit_digits\n" + text)


YAML = {name: partial(yaml_files, name) for name in payloads.yaml_tags(Path())}
add("fit with yaml", YAML, "fit vit_digits --config own.yaml", "own.yaml")
add("plan of yaml", YAML, "plan plan.yaml", "plan.yaml")
add("run's yaml", YAML, "evaluate run", "recipe.yaml")


# Data

DATA = "fit vit_cifar10 --model.weights null --data.download false --data.root"


def npz(**arrays) -> Make:
    """A CIFAR-10 file; a function makes its array with the marker."""

    def write(path, marker):
        payloads.write_npz(path, **{name: one(marker) if callable(one) else one for name, one in arrays.items()})

    return at("cifar.npz", write)


PARTS = ("images", "labels", "split", "class_names")
ARRAYS = {f"objects for {part}": npz(**{part: payloads.object_array}) for part in PARTS}
ARRAYS |= {"words for labels": npz(labels=np.array(["a"] * 4)), "a matrix for split": npz(split=np.zeros((4, 2)))}
ARRAYS |= {"a number for class_names": npz(class_names=np.array(3)), "a pickle": at("cifar.npz", pickled)}
add("arrays", ARRAYS, f"{DATA} cifar.npz", "cifar.npz")


def cifar_batches(folder, marker):
    (folder / CIFAR10.base_folder).mkdir()
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], "")]:
        pickled(folder / CIFAR10.base_folder / name, marker)


def processed_fashion(value, folder, marker):
    processed = folder / "FashionMNIST" / "processed"
    processed.mkdir(parents=True)
    for name in ("training.pt", "test.pt"):
        torch.save(Trap(marker) if value is Trap else value, processed / name)


FASHION = "fit mlp_fashion_mnist --data.download false --data.root HERE"
PROCESSED = {"trap": Trap, "words": ("a", "b"), "no labels": (torch.zeros(2), None), "a number": (torch.zeros(3), 1)}
fashion = {name: partial(processed_fashion, value) for name, value in PROCESSED.items()}
add("processed Fashion-MNIST", fashion, FASHION, "FashionMNIST")
add("CIFAR-10", {"changed batches": cifar_batches}, f"{DATA} HERE", CIFAR10.base_folder)


def scripts(folder, marker):
    text_model(config(), folder, marker)
    for name in ("evil.py", "scripts.py"):
        at(f"scripts/{name}", python)(folder, marker)


ROOTS = dict.fromkeys(("scripts/evil.py", "scripts", "HERE/scripts"), scripts)
add("loading script", ROOTS, TEXT.replace("HERE/reviews", "NAME"), "data.root", "NAME")

RECIPE = """
from trainer import Memory, Recipe
from trainer.data import ImageFolder, TextFiles
from trainer.models import TextClassifier, VisionTransformer

recipe = Recipe(model={model}, data={data}, batch_size=2, memory=Memory(micro_batch_size=2))
"""


def table(write: Make, file: str, folder: Path, marker: Path) -> None:
    model = f"TextClassifier('distilbert', tokenizer={tokenizer_folder()!r})"
    (folder / "own.py").write_text(RECIPE.format(model=model, data="TextFiles('data', cache_dir='cache')"))
    write(folder / file, marker)


def pickle_in_a_schema(path, marker):
    """Two rows, of which the second has no text: the extension type of the first column is not read."""
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type"}
    extension[b"ARROW:extension:metadata"] = pickle.dumps(Trap(marker))
    fields = [pyarrow.field("text", pyarrow.string(), metadata=extension), pyarrow.field("label", pyarrow.int64())]
    rows = pyarrow.table([["w2", ""], [0, 1]], schema=pyarrow.schema(fields))
    pyarrow.parquet.write_table(rows, path)


TABLES = {
    "unpack": {
        "tar.csv": payloads.tar_with_links,
        "zip.jsonl": payloads.zip_with_dots,
        "zip.parquet": payloads.zip_with_dots,
    },
    "": {
        "script.py": python,
        "nul.csv": lambda path, marker: path.write_bytes(b"text,label\n\0\0,1\n" + pickle.dumps(Trap(marker))),
        **dict.fromkeys(("pickle.csv", "pickle.jsonl", "pickle.parquet"), pickled),
    },
    "line 1: ": {"deep.jsonl": content('{"text":' + payloads.DEEP_JSON + ', "label": 1}\n')},
    "schema.parquet row 2": {"schema.parquet": pickle_in_a_schema},
}
for words, writers in TABLES.items():
    rows = {file: partial(table, write, file) for file, write in writers.items()}
    add("table", rows, "fit own.py --data.train_file NAME", "NAME", words)


def images(write: Make, file: str, folder: Path, marker: Path) -> None:
    model = "VisionTransformer('custom', patch_size=4, layers=1, heads=1, width=8, mlp_width=8)"
    (folder / "own.py").write_text(RECIPE.format(model=model, data="ImageFolder('data', image_size=8)"))
    for part, name in product(("train", "test"), "ab"):
        (folder / "data" / part / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "data" / part / name / "0.png")
    write(folder / "data" / "train" / "a" / file, marker)


IMAGES = {
    "eps.png": content(payloads.POSTSCRIPT),
    "svg.jpg": content("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"),
    "pickle.webp": pickled,
    "cut.tiff": content(b"II*\0\xff\xff\xff\xff"),
    "wmf.bmp": content(b"\xd7\xcd\xc6\x9a\0\0" + b"\0" * 50),
}
add("image", {file: partial(images, write, file) for file, write in IMAGES.items()}, "fit own.py", "NAME")


# Checkpoints

TENSORS = "rank-00000.safetensors"
RESUME = f"fit {SMALL} --max_steps=2 --checkpoint.every=1 --checkpoint.asynchronous=false --run.dir=again"
RESUME += " --run.resume=HERE/step-00000001"


@lru_cache
def saved_checkpoint() -> Path:
    run_dir = Path(mkdtemp(prefix="run-")) / "run"
    words = RESUME.replace("again", str(run_dir)).replace("HERE/step-00000001", "none")
    assert run(words.split()) == 0
    return run_dir / "checkpoints" / "step-00000001"


def forged(file: str, write: Make, folder: Path, marker: Path) -> None:
    """Replace a file of a checkpoint, and make its manifest fit."""
    copy = shutil.copytree(saved_checkpoint(), folder / "step-00000001", dirs_exist_ok=True)
    write(copy / file, marker)
    payloads.fit_manifest(copy, file)


def entry(way: str, value: object) -> Make:
    return lambda path, marker: payloads.set_entry(path, way.split("."), value)


NO_STATES = {text: content(text) for text in ("[1]", "{}", '{"tensors": 1, "values": 2}')}
NO_STATES |= {"a pickle": pickled, "deep": content(payloads.DEEP_JSON)}
LIES = {f"lying: {name}": content(lie) for name, lie in payloads.LYING.items()}
for file, contents in {"state.json": NO_STATES, "rank-00000.json": NO_STATES, TENSORS: NO_STATES | LIES}.items():
    rows = {name: partial(forged, file, write) for name, write in contents.items()}
    add(f"checkpoint's {file}", rows, RESUME, file, codes=(1, 2))
STATES = {f"{way}={value}": entry(way, value) for way, value in payloads.CHECKPOINT_STATES}
rows = {name: partial(forged, "state.json", write) for name, write in STATES.items()}
add("checkpoint's state", rows, RESUME, "state.json holds content that no run wrote", codes=(1,))
history = {"no text": partial(forged, "metrics.csv", content(b"step,loss\n1,\xff\n"))}
add("checkpoint's history", history, RESUME, "metrics.csv holds content that no run wrote", codes=(1,))


# Tests


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """What a payload makes when it is executed, as does a Ghostscript that is started."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "executed"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\nmkdir '{path}'\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    yield path
    folders = [tmp_path.parents[1], tmp_path.parent]
    assert [*tmp_path.rglob(path.name), *(found for folder in folders for found in folder.glob(path.name))] == []


@pytest.fixture
def refused(marker, tmp_path, capsys):
    """A function: run a command line, which must be refused in one line with all of ``named`` in it."""

    def check(command, *named, codes=(2,)):
        capsys.readouterr()
        assert run(command.replace("HERE", str(tmp_path)).split()) in codes
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].startswith("trainer: error: ")
        assert [words for words in named if words.replace("HERE", str(tmp_path)) not in lines[-1]] == []
        assert "Traceback" not in "".join(lines)
        assert not marker.exists()

    return check


@pytest.mark.parametrize(("make", "command", "named", "codes"), CASES)
def test_it_is_refused_by_name_and_not_executed(make, command, named, codes, refused, marker, tmp_path):
    make(tmp_path, marker)
    refused(command, *named, codes=codes)


@pytest.mark.parametrize("name", [*payloads.PICKLES, "apply", "new", "apply with state"])
def test_a_careless_reader_would_execute_it(name, marker, tmp_path):
    """Or else the test above would show nothing."""
    with suppress(RuntimeError, TypeError, AttributeError, pickle.UnpicklingError, yaml.YAMLError):  # afterwards
        if name in payloads.PICKLES:
            payloads.PICKLES[name](tmp_path / name, marker)
            torch.load(tmp_path / name, weights_only=False)
        else:
            yaml.unsafe_load(payloads.yaml_tags(marker)[name])
    marker.rmdir()


def test_code_beside_a_model_that_nothing_needs_is_not_executed(marker, tmp_path, capsys):
    folder = text_model(config(auto_map=MODELLING), tmp_path, marker)
    for file in ("__init__.py", "modelling.py", "tokenizer.py", "custom_generate.py", "setup.py", "conftest.py"):
        python(folder / file, marker)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenizer.Evil", "tokenizer.Evil"]})
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    for file in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth"):
        torch.save(Trap(marker), folder / file)
    assert run(f"{TEXT} --run.dir=run".replace("HERE", str(tmp_path)).split()) == 0, capsys.readouterr().err
    shutil.copy(folder / "modelling.py", tmp_path / "run" / "model")
    assert run(["predict", "run", "--text", "w2"]) == 0, capsys.readouterr().err


def test_a_true_checkpoint_is_resumed_from_and_payloads_beside_it_are_not_executed(marker, tmp_path):
    unchanged = content((saved_checkpoint() / "state.json").read_bytes())
    forged("state.json", unchanged, tmp_path, marker)
    assert run(RESUME.replace("HERE", str(tmp_path)).split()) == 0
    for extra in (".metadata", "optimizer.pt", "__init__.py", "manifest.json.pkl", "state.json.pkl"):
        pickled(tmp_path / "step-00000001" / extra, marker)
    run(RESUME.replace("HERE", str(tmp_path)).split())


@pytest.mark.slow
def test_pictures_to_classify_start_no_program(refused, marker, tmp_path):
    assert run(f"fit {SMALL} --max_steps=1 --run.dir=run".split()) == 0
    at("eps.png", content(payloads.POSTSCRIPT))(tmp_path, marker)
    refused("predict run --image eps.png", "eps.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    weights = tmp_path / "run" / "model" / "model.safetensors"
    payloads.PICKLES["zip.pth"](weights, marker)
    for command in ("predict run --image 0.png", "evaluate run"):
        assert run(command.split()) == 1  # it is not what the run has written
    (tmp_path / "run" / "model" / "files.json").unlink()
    refused("predict run --image 0.png", "model.safetensors")
    refused("evaluate run", "model.safetensors")
    weights.unlink()
    save_file({"a": torch.zeros(2)}, weights)
    refused("evaluate run", "model.safetensors", "does not fit")
