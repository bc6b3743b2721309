"""Whether a dataset, or a tokenizer, is the one that a run was started with: hashes of what is in them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from trainer.contract import Data
from trainer.data.content import Content
from trainer.data.generators import generators_kept, seed_generators
from trainer.data.tables import add_rows, blocks, spread
from trainer.errors import require

SAMPLES = 64
"""Samples that are looked at where a split has no fingerprint of its own."""

_SEED = 0


def fingerprint(data: Data) -> str:
    """Of the content of a prepared dataset, as sha256 in hexadecimal: train, val and test, in order, and the classes.

    Equal for equal content, wherever it lies and whatever its files are called; it depends on no process, number of
    workers or ranks. Different when a sample, a label, the order, the tokenisation or the augmentation differs:

    * always, for arrays (every pixel), folders of images (every byte of every file, hashed while the files are checked
      before training) and texts (every token, up to 1 GiB of them);
    * for a dataset of one's own whose splits define ``fingerprint() -> str``, as far as that sees;
    * for a ``datasets.Dataset``: every row up to 1 GiB, of a larger one evenly spread blocks of rows, and up to 64
      samples as they come out of it (formats and transforms show there);
    * for any other split: its size, its ``lengths`` and ``augmented``, and up to 64 evenly spread samples. A change of
      another sample is not seen. Samples are drawn with fixed seeds; the generators of torch, NumPy and ``random`` are
      left as they were. One that cannot be loaded counts as such.

    Raises:
        RecipeError: for a ``fingerprint`` method that returns no text.
    """
    content = Content(1, getattr(data, "num_classes", None), list(getattr(data, "class_names", None) or []))
    for name in ("train", "val", "test"):
        split = getattr(data, name)
        content.add(name)
        content.add(None if split is None else split_fingerprint(split))
    return content.hexdigest()


def data_files(data: Data) -> dict[str, str]:
    """A short hash of every file of a dataset whose splits define ``files()``: what to name when one has changed."""
    splits = {name: getattr(data, name) for name in ("train", "val", "test")}
    return {
        f"{name}/{file}": digest
        for name, split in splits.items()
        if callable(getattr(split, "files", None))
        for file, digest in split.files().items()
    }


def split_fingerprint(split: Any) -> str:
    """Of one split; see :func:`fingerprint`."""
    own = getattr(split, "fingerprint", None)
    if callable(own):
        found = own()
        require(
            isinstance(found, str), f"{type(split).__name__}.fingerprint() returned {found!r}: it must return a text"
        )
        return found
    size = len(split)
    content = Content(size, bool(getattr(split, "augmented", False)))
    lengths = getattr(split, "lengths", None)
    content.add(None if lengths is None else np.asarray(lengths))
    if _is_table(split):
        for rows in blocks(size, split.data.nbytes * size // max(1, split.data.num_rows)):
            add_rows(content, split, rows)
    with generators_kept():
        for index in spread(size, SAMPLES):
            content.add(index)
            content.add(_sample(split, index))
    return content.hexdigest()


def _is_table(split: Any) -> bool:
    import datasets

    return isinstance(split, datasets.Dataset)


def _sample(split: Any, index: int) -> Any:
    seed_generators(_SEED + index)
    try:
        return split[index]
    except Exception as error:  # the loader deals with it, when it is this sample's turn
        return f"cannot be loaded: {type(error).__name__}"


def tokenizer_hash(tokenizer: Any) -> str | None:
    """Of what decides a tokenizer's output, as sha256 in hexadecimal; ``None`` for none.

    Vocabulary, merges, normaliser, special tokens, and the sides of padding and truncation count. The chat template
    does not, nor does what every use may change: whether padding or truncation is switched on, and to which length.
    """
    if tokenizer is None:
        return None
    content = Content(1, {name: str(token) for name, token in tokenizer.special_tokens_map.items()})
    for name in ("padding_side", "truncation_side", "model_input_names"):
        content.add(getattr(tokenizer, name, None))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
        content.add(json.dumps(state, sort_keys=True))
    else:
        content.add(type(tokenizer).__name__)
        content.add(json.dumps(tokenizer.get_vocab(), sort_keys=True))
        content.add(getattr(tokenizer, "bpe_ranks", None))
    return content.hexdigest()
