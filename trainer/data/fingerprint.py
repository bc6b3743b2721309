"""Content hashes of datasets and tokenizers, to detect changes since the start of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.contract import Data, as_samples, splits_of
from trainer.data.cache import MAX_HASHED_BYTES, evenly_spaced
from trainer.data.loader import preserve_rng_state, seed_everything
from trainer.errors import RecipeError

NUM_HASHED_SAMPLES = 64  # number of samples that are hashed if a split defines no fingerprint
MAX_DEPTH = 16  # max depth of nesting, because a sample may refer to itself
BLOCK = 1024  # rows of a table read at once


def fingerprint(data: Data) -> str:
    """Return the sha256, in hexadecimal, of a prepared dataset: train, val and test, in order, and the classes.

    Equal content gives an equal hash, independent of paths, file names, processes, workers and ranks. The hash detects
    a change of a sample, a label, the order, the tokenisation or the augmentation:

    * always, for arrays, folders of images (every byte of every file) and texts (every token, up to 1 GiB of them);
    * for a custom dataset whose splits define ``fingerprint() -> str``, as that function does;
    * for a ``datasets.Dataset``: in every row up to 1 GiB, in evenly spread blocks of rows of a larger one;
    * for these and any other split: in size, ``lengths``, ``augmented``, and up to 64 evenly spread samples, drawn with
      fixed seeds. Changes of other samples are not detected. A sample that cannot be loaded is hashed as such.
    """
    content = ContentHasher(1, data.num_classes, list(data.class_names or []))
    for name, split in (("train", data.train), ("val", data.val), ("test", data.test)):
        content.add(name)
        content.add(None if split is None else split_fingerprint(split))
    if (chances := data.sample_weights()) is not None:
        content.add(np.asarray(chances, dtype=np.float64))
    return content.hexdigest()


def data_files(data: Data) -> dict[str, str]:
    """Return a short hash of every file of a dataset whose splits define ``files()``, to name changed files."""
    files = {name: split.files().items() for name, split in splits_of(data).items()}
    return {f"{name}/{file}": digest for name, found in files.items() for file, digest in found}


def split_fingerprint(split: Any) -> str:
    """Return the hash of one split; see :func:`fingerprint`."""
    samples = as_samples(split)
    if (found := samples.fingerprint()) is not None:
        if not isinstance(found, str):
            raise RecipeError(f"{type(split).__name__}.fingerprint() returned {found!r}: it must return a string")
        return found
    split = samples.original
    size, lengths = len(split), samples.lengths
    content = ContentHasher(size, bool(samples.augmented))
    content.add(None if lengths is None else np.asarray(lengths))
    tables = sys.modules.get("datasets")  # if it was not imported, this is not one of its tables
    if tables is not None and isinstance(split, tables.Dataset):
        for rows in sample_row_blocks(size, split.data.nbytes * size // max(1, split.data.num_rows)):
            add_rows(content, split, rows)
    with preserve_rng_state():
        for index in evenly_spaced(size, NUM_HASHED_SAMPLES):
            content.add(index)
            seed_everything(index)
            try:
                sample = split[index]
            except Exception as error:  # the loader handles it when it loads this sample
                sample = f"cannot be loaded: {type(error).__name__}"
            content.add(sample)
    return content.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str | None:
    """Return the sha256 of everything that determines a tokenizer's output, except the chat template, and the padding
    and truncation of single calls; ``None`` for none."""
    if tokenizer is None:
        return None
    content = ContentHasher(1, {name: str(token) for name, token in tokenizer.special_tokens_map.items()})
    for name in ("padding_side", "truncation_side", "model_input_names"):
        content.add(getattr(tokenizer, name, None))
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        content.add(json.dumps({**json.loads(backend.to_str()), "padding": None, "truncation": None}, sort_keys=True))
    else:
        content.add(type(tokenizer).__name__)
        content.add(json.dumps(tokenizer.get_vocab(), sort_keys=True))
        content.add(getattr(tokenizer, "bpe_ranks", None))
    return content.hexdigest()


class ContentHasher:
    """A sha256 over values with type, size and order, except of keys; equal on every machine.

    Objects hash by type name and attributes."""

    def __init__(self, *values: Any, depth: int = 0) -> None:
        self._hash = hashlib.sha256()
        self.digest, self.hexdigest = self._hash.digest, self._hash.hexdigest
        for value in values:
            self.add(value, depth)

    def add(self, value: Any, depth: int = 0) -> None:
        if value is None or isinstance(value, bool):
            self._update("constant", repr(value).encode())
        elif isinstance(value, int):
            self._update("int", str(value).encode())
        elif isinstance(value, float):
            self._update("float", struct.pack("<d", value))
        elif isinstance(value, str):
            self._update("text", value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, bytes | bytearray | memoryview):
            self._update("bytes", value)
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            self._add_array(np.asarray(value), depth)
        elif depth > MAX_DEPTH:
            self._update("deep", type(value).__qualname__.encode())
        else:
            self._add_nested(value, depth + 1)

    def _update(self, kind: str, content: Any) -> None:
        view = memoryview(content).cast("B")
        self._hash.update(f"{kind} {len(view)}:".encode())
        self._hash.update(view)

    def _add_tensor(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        self._update("tensor", f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        self._update("bytes", tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b"")

    def _add_array(self, array: np.ndarray, depth: int) -> None:
        if array.dtype.hasobject:
            self._add_nested(array.tolist() if array.ndim else [array.item()], depth + 1)
            return
        if sys.byteorder == "big" or array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        self._update("array", f"{array.dtype.str} {array.shape}".encode())
        self._update("bytes", np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else b"")

    def _add_nested(self, value: Any, depth: int) -> None:
        if isinstance(value, Mapping):
            parts = [[ContentHasher(part, depth=depth).digest() for part in item] for item in value.items()]
            self._update("mapping", b"".join(key + item for key, item in sorted(parts)))
        elif isinstance(value, Set):
            self._update("set", b"".join(sorted(ContentHasher(item, depth=depth).digest() for item in value)))
        elif isinstance(value, Sequence):
            self._update("sequence", str(len(value)).encode())
            for item in value:
                self.add(item, depth)
        elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # an image of PIL
            self._update("image", f"{value.mode} {value.size}".encode())
            self._update("bytes", value.tobytes())
        else:
            self._update("object", type(value).__qualname__.encode())
            attributes = getattr(value, "__dict__", None)
            if dataclasses.is_dataclass(value):
                attributes = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            self.add(attributes, depth)


def sample_row_blocks(size: int, total_bytes: int) -> list[range]:
    """Return the blocks of rows to read from ``size`` rows of ``total_bytes``: all, or evenly spread ones."""
    count = -(-size // BLOCK)
    wanted = count if total_bytes <= MAX_HASHED_BYTES else max(2, count * MAX_HASHED_BYTES // total_bytes)
    return [range(block * BLOCK, min((block + 1) * BLOCK, size)) for block in evenly_spaced(count, wanted)]


def add_rows(content: ContentHasher, table: Any, rows: Sequence[int]) -> None:
    """Add the ``rows`` of a ``datasets.Dataset``: columns, types and values, independent of the chunks in its files."""
    found = table.with_format("arrow")[rows]
    for name in found.column_names:
        content.add(name)
        _add_array(content, found.column(name).combine_chunks())


def _add_array(content: ContentHasher, array: Any) -> None:
    import pyarrow as pa  # imported here, because few runs need it at the start
    import pyarrow.compute as pc

    kind = array.type
    content.add(str(kind))
    content.add(array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None)
    if isinstance(array, pa.ExtensionArray):
        _add_array(content, array.storage)
    elif pa.types.is_dictionary(kind):
        _add_array(content, array.dictionary_decode())
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        content.add(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False))
        _add_array(content, array.flatten())
    elif pa.types.is_struct(kind):
        for position, part in enumerate(array.flatten()):
            content.add(kind.field(position).name)
            _add_array(content, part)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        content.add(array.fill_null(False if pa.types.is_boolean(kind) else 0).to_numpy(zero_copy_only=False))
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        content.add(array.to_pylist())
    else:
        content.add(repr(array.to_pylist()))
