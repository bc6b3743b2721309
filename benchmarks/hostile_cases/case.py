"""What a case is, the recipes that cases start from, and functions that write files.

A case is built in a copy of a prepared folder, which is the working directory. It holds ``own.py`` (a tiny recipe on
digits), ``text.py`` (a tiny BERT on ``t.csv``), ``chat.py`` (a tiny Llama on ``chat.jsonl``), the models ``bert`` and
``llama`` with their tokenizers, and finished runs: ``run`` of the first recipe, ``spoken`` of the second, ``talked`` of
the third, and ``adapted``, the third with LoRA. ``../victim`` must stay as it is, and ``../marker`` must not appear.
"""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

REFUSED, OWN, RAN, ANY = "refused", "own", "ran", "any"
"""Refused in one line; an error of the user's code, with its place before the traceback; ran; refused or ran."""

MARKER = "../marker"
CODE = f"open({MARKER!r}, 'w')\n"
ESC = "\x1b]0;owned\x07\x1b[2J"


class Case(NamedTuple):
    """One hostile input.

    Args:
        category: the group in the table of results.
        given: what the input is, in words; also the name of the case.
        build: writes the files, and returns the words after ``trainer``.
        expect: REFUSED, OWN, RAN or ANY.
        says: text that the error line must contain, such as the key or the file; for RAN, that must be printed.
        env: environment variables to set, or to remove where ``None``.
        fresh: start a new interpreter, because the variables are read when Python starts.
        code: the exit code of a refusal: 2 for wrong input, ``None`` for 1 or 2.
    """

    category: str
    given: str
    build: Callable[[], list[str]]
    expect: str = REFUSED
    says: str = ""
    env: Mapping[str, str | None] = {}
    fresh: bool = False
    code: int | None = None


FIT = ["fit", "own.py"]
TEXT = ["fit", "text.py"]


def own(model: str = "MLP(hidden=[16])", data: str = "Digits()", more: str = "", before: str = "") -> str:
    """The source of a recipe of one step."""
    return f"""
from dataclasses import dataclass
import os, sys, warnings
import torch
from torch import nn
from trainer import Checkpoint, Data, Loss, Memory, Model, Optim, Recipe, Run
from trainer.data import CIFAR10, Conversations, Digits, Documents, FashionMNIST, HubText, ImageFolder, IMDb, Mixture, StreamedText, TextFiles
from trainer.models import MLP, CausalLM, TextClassifier
{before}
recipe = Recipe(
    model={model}, data={data},
    **dict(dict(optim=Optim("sgd", lr=0.1), batch_size=16, max_steps=1,
                run=Run(dir="out", predict=False, evaluate=False)), **dict({more})),
)
"""


TEXT_MODEL = "TextClassifier('bert')"
SPOKEN = own(TEXT_MODEL, "TextFiles('t.csv', cache_dir='cache', max_length=8)", "batch_size=2")
CONVERSATION = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
CONVERSATIONS = "".join(json.dumps({"messages": CONVERSATION}) + "\n" for _ in range(4))
CHATS = "Conversations('chat.jsonl', chat_template='chatml', cache_dir='cache', max_length=64)"
TALKED = own("CausalLM('llama', weights='llama')", CHATS, "batch_size=2")
EVALUATED = "run=Run(dir='out', predict=False)"


def wrote(name: str, content: str | bytes, words: list[str]) -> list[str]:
    """Write a file, and return ``words``."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return words


def done(action: Callable[[], Any], words: list[str]) -> list[str]:
    """Do something, and return ``words``."""
    action()
    return words


GOOD = "text,label\ngood film,1\nbad film,0\ngood,1\nbad,0\n"


def picture(kind: str = "PNG", size: tuple[int, int] = (8, 8), mode: str = "RGB", **options: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.new(mode, size)
    if options.pop("frames", False):
        options |= {"save_all": True, "append_images": [Image.new(mode, size)] * 3}
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def no_file(path: str) -> dict[str, Callable[[str], Any]]:
    """What could be at ``path`` in the place of a file, and how to make it there."""
    links = {"a link to /dev/zero": "/dev/zero", "a link to itself": Path(path).name}
    return {"a named pipe": os.mkfifo, **{given: partial(os.symlink, target) for given, target in links.items()}}


def replaced(path: str, make: Callable[[str], Any]) -> None:
    """Remove ``path``, a file or a folder, and make something else there."""
    shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)
    make(path)
