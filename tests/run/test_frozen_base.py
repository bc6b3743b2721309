"""Adapters beside frozen weights of a file: checkpoints leave these out, know the file, and resume bit for bit."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
from helpers.resumed import TINY, losses, recipe, resume, saved
from safetensors.torch import load_file, save_file

from trainer import Optim, RecipeError
from trainer.api import fit
from trainer.cli import run as command
from trainer.models import LoRA, VisionTransformer
from trainer.run.state import TensorState

pytestmark = pytest.mark.usefixtures("no_pictures")

WHOLE = 2 * (3 * 16 * 16 + 16 * 16 + 2 * 16 * 32)
"""Weights of the matrices in the blocks."""


@pytest.fixture
def weights(tmp_path):
    """A file of weights, without the head, which is new."""
    module = VisionTransformer("custom", **TINY, num_classes=10, image_size=8).build()
    state = {name: tensor for name, tensor in module.state_dict().items() if "heads." not in name}
    save_file(state, tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def adapted(weights, base="nf4", dora=False):
    lora = LoRA(rank=2, base=base, dora=dora)
    return VisionTransformer("custom", **TINY, weights=weights and str(weights), lora=lora)


def names_in(run_dir, step=2):
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    return {name for path in folder.glob("rank-*.json") for name in json.loads(path.read_text())["tensors"]}


def train(run_dir, **changes):
    fit(recipe(run_dir, **changes))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("count", "base", "memory", "dora"),
    [
        (1, "nf4", {"init": "meta"}, False),
        (1, "full", {"precision": "bf16-true", "cpu_offload": "optimizer"}, False),
        (2, "nf4", {"strategy": "fsdp", "init": "meta"}, False),
        pytest.param(2, "full", {"strategy": "fsdp"}, False, marks=pytest.mark.slow),
        pytest.param(2, "nf4", {}, False, marks=pytest.mark.slow),
        pytest.param(3, "nf4", {"strategy": "fsdp", "cpu_offload": "optimizer"}, False, marks=pytest.mark.slow),
        (1, "full", {}, True),
        (2, "full", {"strategy": "ddp"}, True),
        (2, "full", {"strategy": "fsdp", "init": "meta"}, True),
        (2, "full", {"strategy": "fsdp", "cpu_offload": "optimizer"}, True),
        (1, "full", {"precision": "bf16-true", "cpu_offload": "optimizer", "init": "meta"}, True),
    ],
)
def test_a_checkpoint_holds_what_trains_and_is_resumed_bit_for_bit(count, base, memory, dora, weights, ranks, tmp_path):
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    changes = {"model": adapted(weights, base, dora), "memory": memory, "optim": Optim("adamw", lr=1e-2, ema=0.9)}
    for call in (partial(train, whole, **changes), partial(resume, whole, rest, 2, **changes)):
        call() if count == 1 else ranks(count).run(call)
    names = {name for name in names_in(whole) if name.startswith("weights/")}
    assert {name for name in names if ".lora_" not in name} == {  # norm and head after the blocks
        f"weights/{name}" for name in ("encoder.ln.weight", "encoder.ln.bias", "heads.head.weight", "heads.head.bias")
    }
    assert len([name for name in names if ".lora_" in name]) == (12 if dora else 8)  # of four layers
    assert losses(rest) == losses(whole)
    assert saved(rest, 6) == saved(whole, 6)
    merged = load_file(rest / "model" / "model.safetensors")
    assert sum(tensor.numel() for name, tensor in merged.items() if ".layers." in name and tensor.ndim == 2) == WHOLE
    assert (rest / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()


def test_another_file_is_refused_by_name_and_so_is_an_export_beside_it(weights, tmp_path, capsys, golden):
    model = adapted(weights)
    fit(recipe(tmp_path / "run", model=model))
    assert command(["checkpoint", "export", str(tmp_path / "run"), "--out", str(tmp_path / "exported")]) == 0
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "run/model"))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == tensor).all() for name, tensor in theirs.items())
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with golden.raises(RecipeError):
        resume(tmp_path / "run", tmp_path / "rest", 2, model=model)
    capsys.readouterr()
    assert command(["checkpoint", "export", str(tmp_path / "run"), "--out", str(tmp_path / "other")]) == 2
    assert "changed: base.safetensors" in capsys.readouterr().err
    resume(tmp_path / "run", tmp_path / "rest", 2, model=model, run={"allow_change": ["base"]})
    assert losses(tmp_path / "rest") != losses(tmp_path / "run")[2:]


def test_random_frozen_weights_are_saved_for_no_file_has_them(tmp_path):
    model = adapted(None)
    fit(recipe(tmp_path / "whole", model=model))
    assert sum(name.endswith(".codes") for name in names_in(tmp_path / "whole")) == 4
    resume(tmp_path / "whole", tmp_path / "rest", 2, model=model)
    assert saved(tmp_path / "rest", 6) == saved(tmp_path / "whole", 6)


def test_a_checkpoint_of_an_earlier_version_which_holds_all_is_resumed(weights, tmp_path, monkeypatch):
    model, before = adapted(weights, "full"), TensorState.__init__
    with monkeypatch.context() as patch:
        patch.setattr(TensorState, "__init__", lambda self, stack, stepper, base: before(self, stack, stepper))
        patch.setattr(VisionTransformer, "base_files", lambda self: ())
        fit(recipe(tmp_path / "whole", model=model))
    assert any(name.endswith("base_layer.weight") for name in names_in(tmp_path / "whole"))
    shutil.copy(weights, tmp_path / "copy")
    resume(tmp_path / "whole", tmp_path / "rest", 2, model=model)
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")
    assert not any(name.endswith("base_layer.weight") for name in names_in(tmp_path / "rest", 4))


def test_what_is_frozen_and_in_no_file_is_saved(weights, tmp_path):
    optim = Optim("adamw", lr=1e-2, groups={"*.lora_A.*": {"frozen": True}, "heads.*": {"frozen": True}})
    changes = {"model": adapted(weights), "optim": optim}
    fit(recipe(tmp_path / "whole", **changes))
    names = names_in(tmp_path / "whole")
    assert {"weights/heads.head.weight", "weights/heads.head.bias"} < names
    assert sum(".lora_A." in name and name.startswith("weights/") for name in names) == 4
    assert not any(name.endswith(".codes") for name in names)
    resume(tmp_path / "whole", tmp_path / "rest", 2, **changes)
    assert saved(tmp_path / "rest", 6) == saved(tmp_path / "whole", 6)


def test_what_is_in_nf4_cannot_be_thawed(weights, tmp_path, golden):
    optim = Optim("adamw", groups={"*.codes": {"frozen": False}})
    with golden.raises(RecipeError):
        fit(recipe(tmp_path / "run", model=adapted(weights), optim=optim))
