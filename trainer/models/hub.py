"""What transformers reads from folders and from the hub, with no code executed that comes from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import RecipeError, require
from trainer.system.files import require_regular

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
FROM_PADDING = ("roberta", "camembert", "longformer", "mpnet", "luke", "ibert", "xmod")  # in names of model types

MOST_TEXT = 500_000_000
"""Bytes of a file of settings or words; the largest vocabularies take some ten millions."""


def local_folder(source: str) -> str:
    """The path of a ``file://`` URL; anything else as it is."""
    return source.removeprefix("file://")


def is_local(source: str) -> bool:
    """Whether ``source`` is a folder here."""
    return Path(local_folder(source)).is_dir()


def from_hub(key: str, source: str, load: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``load`` of transformers with the other arguments; what goes wrong, but lack of memory, becomes one line.

    That names the setting ``model.key``, whose value ``source`` is a hub id, a folder or a ``file://`` URL of one.
    """
    from safetensors import SafetensorError

    if source.startswith(("file://", "/", "./", "../")) and not is_local(source):
        raise RecipeError(f"model.{key}={source} is not a folder")
    if is_local(source):
        _require_files(Path(local_folder(source)))
    try:
        return load(*args, **kwargs)
    except Exception as error:  # transformers checks little of what is in a file before it uses it
        if isinstance(error, MemoryError | RuntimeError) and "memory" in str(error):
            raise  # no fault of the files
        reason = next(iter(str(error).strip().splitlines()), "")
        if not isinstance(error, OSError | ValueError | SafetensorError):
            reason = f"{type(error).__name__}: {reason}."
        fix = "Give a local folder as save_pretrained writes it, or a hub id"
        if "trust_remote_code" in str(error):
            reason = "it needs Python code that comes with it (auto_map), and no such remote code is executed."
            fix = (
                "Give a model of an architecture that transformers has itself, or read the code and write a "
                "trainer.Model that imports it"
            )
        raise RecipeError(f"model.{key}={source!r} cannot be loaded: {reason} {fix}") from error


def _require_files(folder: Path) -> None:
    """Refuse what transformers would wait for, or read without an end: a named pipe, a device, JSON of gigabytes."""
    for path in folder.iterdir():
        if path.exists() and not path.is_dir():
            try:
                require_regular(path.stat(), path)
            except OSError as error:
                raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
            small = path.suffix not in (".json", ".txt") or path.stat().st_size <= MOST_TEXT
            require(small, f"{path} is larger than {MOST_TEXT / 1e6:g} MB: too much for settings or words")


def positions(config: Mapping[str, Any]) -> int | None:
    """The most tokens that a model takes, from the settings in its ``config.json``; ``None`` where any number goes."""
    kind = str(config.get("model_type"))
    found = next((config[name] for name in POSITIONS if isinstance(config.get(name), int)), 0)
    if any(name in kind for name in FROM_PADDING):  # which do not use the positions up to that of the padding token
        found -= 1 + (config.get("pad_token_id") or 0)
    return found if found > 0 and "t5" not in kind else None  # T5 has the entry, but only relative positions


def refuse_code(name: str, config: Any) -> None:
    """Refuse a ``config`` of the folder or hub id ``name`` for which transformers would run code from the hub."""
    wished = [getattr(config, key, None) for key in ("_attn_implementation", "_experts_implementation")]
    kernels = [text for text in map(str, wished) if "/" in text]
    asks = f"model.name={name!r}: its configuration asks for"
    require(
        not kernels,
        f"{asks} the kernel {', '.join(kernels)}, which is code from the hub, and is not executed: take "
        "attn_implementation out of its config.json",
    )
    require(
        getattr(config, "quantization_config", None) is None,
        f"{asks} quantised weights, which cannot be trained and may need code from the hub: give a model without "
        "quantization_config in its config.json",
    )
