"""Small models, and files of weights to start them from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from helpers.problems import tokenizer_folder
from trainer.models import TextClassifier, VisionTransformer


def vit(**changes: Any) -> VisionTransformer:
    """For 16 pixels and five classes; its sizes are no multiples of numbers of ranks."""
    values = {"patch_size": 4, "layers": 3, "heads": 2, "width": 66, "mlp_width": 131, "image_size": 16}
    return VisionTransformer("custom", **{"num_classes": 5, **values, **changes})


def text(**changes: Any) -> TextClassifier:
    """DistilBERT for five classes."""
    config = {"n_layers": 3, "dim": 66, "hidden_dim": 131, "n_heads": 2, "max_position_embeddings": 64}
    values = {"name": "distilbert", "tokenizer": tokenizer_folder(), "config": config, "num_classes": 5}
    return TextClassifier(**(values | changes))


def saved(folder: Path, kind: str, **changes: Any) -> str:
    """Weights of a ``text`` model or a ``vit``, whose head does not start at zero; where they are."""
    torch.manual_seed(1)
    model = (text if kind == "text" else vit)(**changes)
    module = model.build()
    if kind == "vit":
        nn.init.normal_(module.heads.head.weight)
    return save_weights(model, module, folder)


def save_weights(model: Any, module: nn.Module, folder: Path) -> str:
    """Write the weights in the format of the model; where they are."""
    if not isinstance(model, VisionTransformer):
        model.save(module, folder, module.state_dict())
        return str(folder)
    save_file(module.state_dict(), folder / "w.safetensors")
    return str(folder / "w.safetensors")
