"""Folders of models and tokenizers."""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from hostile_cases.case import (
    ANY,
    CODE,
    ESC,
    REFUSED,
    TEXT,
    Case,
    done,
    wrote,
)


def json_file(path: str, drop: Iterable[str] = (), **changes: Any) -> None:
    """Drop and change keys of a JSON file."""
    content = json.loads(Path(path).read_text())
    kept = {key: value for key, value in content.items() if key not in drop}
    Path(path).write_text(json.dumps(kept | changes))


def _tensors(change: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]], name: str = "bert/model.safetensors") -> None:
    path = Path(name)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = change(json.loads(raw[8 : 8 + length]), raw[8 + length :])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def changed(name: str, **changes: Any) -> None:
    """Change what the header of a file of tensors says of its first tensor."""
    def change(header: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        next(value for key, value in header.items() if key != "__metadata__").update(changes)
        return header, data

    _tensors(change, name)


def _changed(**changes: Any) -> Callable[[], None]:
    return partial(changed, "bert/model.safetensors", **changes)


def _trapped(name: str) -> None:
    """A pickle, written by hand, that opens the marker."""
    os.unlink("bert/model.safetensors")
    wrote(f"bert/{name}", b"cbuiltins\nopen\n(S'../marker'\nS'w'\ntR.", [])


def _index(target: str) -> None:
    weights = Path("bert/model.safetensors").rename("shard.safetensors")
    header = json.loads(weights.read_bytes()[8 : 8 + int.from_bytes(weights.read_bytes()[:8], "little")])
    names = dict.fromkeys((name for name in header if name != "__metadata__"), target)
    wrote("bert/model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": names}), [])


CONFIG, TOKENIZER = "bert/config.json", "bert/tokenizer.json"
FOLDERS: dict[str, tuple[Callable[[], Any], str]] = {
    "config.json cut": (lambda: wrote(CONFIG, Path(CONFIG).read_text()[:50], []), REFUSED),
    "config.json nested 100,000 deep": (lambda: wrote(CONFIG, '{"a":' * 100_000 + "1" + "}" * 100_000, []), REFUSED),
    "another architecture": (lambda: json_file(CONFIG, model_type="gpt2"), REFUSED),
    "an unknown architecture": (lambda: json_file(CONFIG, model_type="\x1b[31mnonsense"), REFUSED),
    "a hidden size of 10^9": (lambda: json_file(CONFIG, hidden_size=10**9), REFUSED),
    "a hidden size of -8": (lambda: json_file(CONFIG, hidden_size=-8), REFUSED),
    "10^9 layers": (lambda: json_file(CONFIG, num_hidden_layers=10**9), REFUSED),
    "a vocabulary smaller than the tokenizer's": (lambda: json_file(CONFIG, vocab_size=3), REFUSED),
    "positions for 4 tokens": (lambda: json_file(CONFIG, max_position_embeddings=4), REFUSED),
    "a padding token beyond the vocabulary": (lambda: json_file(CONFIG, pad_token_id=10**6), REFUSED),
    "an unknown activation": (lambda: json_file(CONFIG, hidden_act="__import__"), REFUSED),
    "code of its own, called auto_map": (lambda: (json_file(CONFIG, auto_map={"AutoConfig": "evil.C", "AutoModelForSequenceClassification": "evil.M"}, model_type="evil"), wrote("bert/evil.py", CODE, [])), REFUSED),
    "a tokenizer with code of its own": (lambda: (json_file("bert/tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]}, tokenizer_class="T"), wrote("bert/evil.py", CODE, [])), ANY),
    "a label of control characters": (lambda: json_file(CONFIG, id2label={"0": ESC, "1": "b"}), ANY),
    "tokenizer.json cut": (lambda: wrote(TOKENIZER, Path(TOKENIZER).read_text()[:100], []), REFUSED),
    "a token of number 10^9": (lambda: json_file(TOKENIZER, model={"type": "WordLevel", "vocab": {"[UNK]": 10**9, "[PAD]": 0}, "unk_token": "[UNK]"}), REFUSED),
    "a tokenizer without an unknown token": (lambda: json_file(TOKENIZER, model={"type": "WordLevel", "vocab": {"zzz": 0}, "unk_token": "[UNK]"}), ANY),
    "a tokenizer for 2 tokens": (lambda: json_file("bert/tokenizer_config.json", model_max_length=2), REFUSED),
    "a tokenizer for -5 tokens": (lambda: json_file("bert/tokenizer_config.json", model_max_length=-5), REFUSED),
    "a tokenizer without padding": (lambda: json_file("bert/tokenizer_config.json", pad_token=None), REFUSED),
    "no tokenizer": (lambda: os.unlink(TOKENIZER), REFUSED),
    "weights as a pickle": (partial(_trapped, "pytorch_model.bin"), REFUSED),
    "a pickle called model.safetensors": (partial(_trapped, "model.safetensors"), REFUSED),
    "a header of 2^60 bytes": (lambda: wrote("bert/model.safetensors", struct.pack("<Q", 2**60) + b"{}", []), REFUSED),
    "offsets backwards": (_changed(data_offsets=[8, 0]), REFUSED),
    "offsets beyond the end": (_changed(data_offsets=[0, 2**50]), REFUSED),
    "a negative shape": (_changed(shape=[-1, -8]), REFUSED),
    "a shape of 2^62": (_changed(shape=[2**31, 2**31]), REFUSED),
    "a tensor missing": (lambda: _tensors(lambda h, d: ({k: v for k, v in h.items() if "encoder" not in k}, d)), REFUSED),
    "an index that leads out": (partial(_index, "../shard.safetensors"), ANY),
    "an index that leads nowhere": (partial(_index, "/nowhere/shard.safetensors"), REFUSED),
    "model.safetensors links to /dev/zero": (lambda: (os.unlink("bert/model.safetensors"), os.symlink("/dev/zero", "bert/model.safetensors")), REFUSED),
    "config.json is a named pipe": (lambda: (os.unlink(CONFIG), os.mkfifo(CONFIG)), REFUSED),
    "tokenizer.json links to itself": (lambda: (os.unlink(TOKENIZER), os.symlink("tokenizer.json", TOKENIZER)), REFUSED),
    "a LoRA adapter": (lambda: wrote("bert/adapter_config.json", '{"base_model_name_or_path": "/nowhere"}', []), REFUSED),
}


def models() -> Iterable[Case]:
    """Folders of models and tokenizers, loaded, and streamed from meta."""
    for given, (make, expect) in FOLDERS.items():
        words = [*TEXT, "--model.weights", "bert", "--max_steps", "1"]
        yield Case("model folder", given, partial(done, make, words), expect)
        if any(word in given for word in ("index that leads", "tensor missing", "offsets", "2^62")):
            meta = [*words, "--memory.init", "meta"]
            yield Case("model folder", f"from meta: {given}", partial(done, make, meta), expect)
