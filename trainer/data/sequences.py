"""Samples of language models: rows made tokens, with what is to be predicted of them; and what is said of both."""

from __future__ import annotations

import copy
import json
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from re import search, sub
from typing import Any, NamedTuple, Protocol

import datasets
import jinja2
import numpy as np
import pyarrow.compute as pc
from numpy import ndarray
from torch import Tensor
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.data.cache import hash_of
from trainer.data.common import hold_out, local_path, reason
from trainer.data.fingerprint import Content, add_rows, blocks
from trainer.data.rows import Rows, check_columns
from trainer.data.tokens import (
    CHARACTERS_A_TOKEN,
    LEAST_CHARACTERS,
    Padder,
    check_tokenizer,
    chunks,
    compact,
    encoded_by,
    made,
    words_of,
)
from trainer.errors import RecipeError, nearest, require
from trainer.system.children import Bounded, Failed
from trainer.system.environment import first_here
from trainer.system.files import read_regular
from trainer.system.text import escaped
from trainer.values import IGNORED_LABEL

MOST_CHARACTERS = 10_000_000
"""Of a document, which is tokenised as a whole: each takes more than a hundred bytes meanwhile."""

MAX_MESSAGES, SECONDS, MEMORY = 5_000, 10.0, 800_000_000
"""Of a conversation; and of CPU time and of memory that a chat template may take to write it."""

WRITERS: dict[str, Bounded] = {}
"""What renders the chat templates that this process has met, by what decides the texts."""

ROWS_AT_ONCE, MOST_TEMPLATE, SHOWN = 128, 1_000_000, 5
EMPTY, CUT = "is empty", "has no word of the assistant within data.max_length"

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOLS = "tools"
SHAREGPT = {"human": "user", "gpt": "assistant", "function_response": "tool"}

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Sample(NamedTuple):
    """Tokens that go through a model together."""

    ids: ndarray  # int32 (length,)
    labels: ndarray  # int32 (length,), not shifted; -100 where nothing is to be predicted
    lost: int = 0  # tokens after these that were cut off
    place: int = 0  # of several pieces of a document
    bytes: int = 0  # of the document in UTF-8, at its first piece


class RowReader(Protocol):
    """Makes samples of rows."""

    tokenizer: Any
    settings: list[Any]
    """What decides the samples besides the tokenizer, as JSON can hold it."""

    def columns(self, source: str, found: Sequence[str]) -> Sequence[str]:
        """Those to read of the columns that are ``found``."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Sample] | str]:
        """Of each row, its cells by ``columns``, the samples, or what is wrong with it."""

    def prompts(self, texts: Sequence[Any]) -> list[list[int]]:
        """The tokens of texts that a model is to go on from; of a chat also of lists of messages."""


def padder(tokenizer: Any, max_length: int) -> Padder:
    """Pads on the right, whatever the tokenizer does, with any token where it has none for that: masks leave it out."""
    if tokenizer is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.padding_side = "right"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    check_tokenizer(tokenizer, max_length)
    return Padder(tokenizer, max_length)


def ids_of(texts: Sequence[str], tokenizer: Any) -> Iterator[ndarray]:
    """The tokens of each text alone, none of them special unless it is written in the text."""
    for chunk in chunks(texts) if texts else ():
        encoded = encoded_by(tokenizer, chunk, add_special_tokens=False, return_token_type_ids=False)
        yield from (np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"])


def _require_text(text: Any, most: int) -> None:
    require(isinstance(text, str), f"has no text but {text!r:.40}")
    require(len(text) <= most, f"has {len(text):,} characters, and the max is {most:,}: cut it")
    require(text.encode(errors="replace").decode() == text, "is not UTF-8 text")


class DocumentReader:
    """A text, with the tokenizer's end of text behind it, in pieces that overlap by a token."""

    def __init__(self, tokenizer: Any, max_length: int, column: str) -> None:
        self.tokenizer, self.max_length, self.column, self.end = tokenizer, max_length, column, tokenizer.eos_token_id
        if self.end is None:
            raise RecipeError(
                "the tokenizer of model.tokenizer has no end of text (eos_token), which stands behind each document: "
                "choose another"
            )
        self.begin = [one for one in tokenizer("")["input_ids"] if one != self.end]
        self.settings = ["documents", column, max_length]

    def columns(self, source: str, found: Sequence[str]) -> Sequence[str]:
        check_columns(source, found, text_column=self.column)
        return [self.column]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Sample] | str]:
        problems = [self._problem(*cells.values()) for cells in rows]
        texts = [next(iter(cells.values())) for cells, why in zip(rows, problems, strict=True) if not why]
        found = zip(texts, ids_of(texts, self.tokenizer), strict=True)
        return [why or self._pieces(*next(found)) or EMPTY for why in problems]

    def _problem(self, text: Any, problem: str = "") -> str:
        try:
            if text is not None and not problem:
                _require_text(text, MOST_CHARACTERS)
        except RecipeError as error:
            return str(error)
        return problem or ("" if text and text.strip() else EMPTY)

    def _pieces(self, text: str, words: ndarray) -> list[Sample]:
        ids, size = np.array([*self.begin, *words, self.end], dtype=np.int32), len(text.encode())
        starts = range(0, len(ids) - 1, self.max_length - 1)
        pieces = [ids[start : start + self.max_length] for start in starts]
        return [Sample(piece, piece, 0, place, 0 if place else size) for place, piece in enumerate(pieces)]

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self.begin, *ids.tolist()] for ids in ids_of(texts, self.tokenizer)]


class _Written(NamedTuple):
    """A conversation as the template writes it."""

    text: str
    spans: list[tuple[int, int]]  # of characters that are to be predicted

    def parts(self) -> list[tuple[int, int]]:
        """The spans and what is between them."""
        return list(pairwise(sorted({0, len(self.text), *chain.from_iterable(self.spans)})))


class ChatReader:
    """A conversation as the chat template writes it, of which the assistant's words are to be predicted."""

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        column: str | None,
        pair: tuple[str, str],
        template: str | None,
        loss_on: str,
    ) -> None:
        self.tokenizer, self.max_length, self.column, self.pair = tokenizer, max_length, column, pair
        self.template, self.loss_on = _template(tokenizer, template), loss_on
        self.marked = search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        self.unwritten = set[str]()  # sources with tools that it does not write
        added = tokenizer.get_added_vocab()
        self.special = {*added.values(), *tokenizer.all_special_ids}
        self.special_texts = tuple(filter(None, {*added, *tokenizer.all_special_tokens}))
        self.settings = ["conversations", column, *pair, max_length, self.template, loss_on]
        self.most = max(LEAST_CHARACTERS, CHARACTERS_A_TOKEN * max_length)
        own = f"the chat template of model.tokenizer ({tokenizer.name_or_path})"
        self.named = own if template is None else f"data.chat_template={template[:300]!r}"
        self.write: Callable[..., Any] = self._write
        if self.template != CHATML:  # it may come from anywhere, and is a program
            key = hash_of(*self.settings, tokenizer.special_tokens_map, sorted(self.special_texts))
            self.write = WRITERS.setdefault(key, Bounded(self._write, SECONDS, MEMORY))
        self._look_at_ends(template)

    def _look_at_ends(self, given: str | None) -> None:
        """See on a conversation of two words how the template ends a turn of the assistant."""
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        (found,) = self([{"messages": probe}])
        if isinstance(found, str) or self.loss_on == "all":
            return
        last = found[0].labels[found[0].labels != IGNORED_LABEL][-1:].tolist()
        if last and last[0] in self.special:
            if given is not None:  # where a served model is to stop
                self.tokenizer.eos_token = self.tokenizer.convert_ids_to_tokens(last[0])
            return
        fix = "give a data.chat_template that ends its words with {{ eos_token }}"
        ends = "the chat template ends no turn of the assistant with a token that is learned"
        say(f"{ends}, so that the model does not learn to stop: {fix}")

    def columns(self, source: str, found: Sequence[str]) -> Sequence[str]:
        tools = [TOOLS] if TOOLS in found else []
        if tools and TOOLS not in self.template and source not in self.unwritten:
            self.unwritten.add(source)
            say(f"{source} has a column {TOOLS}, which the chat template does not write: give a data.chat_template")
        if self.column is not None:
            check_columns(source, found, messages_column=self.column)
            return [self.column, *tools]
        messages = next((name for name in ("messages", "conversations") if name in found), None)
        if messages is None and (not {*self.pair} <= {*found}):
            raise RecipeError(
                f"{source} has no column messages or conversations, nor data.prompt_column={self.pair[0]!r} and "
                f"data.completion_column={self.pair[1]!r}; it has {', '.join(map(repr, found))}: name its own by "
                "data.messages_column, say"
            )
        return [*(self.pair if messages is None else [messages]), *tools]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Sample] | str]:
        written = [self._written(cells) for cells in rows]
        texts: list[str] = []
        for one in written:
            if isinstance(one, _Written):
                texts += [one.text, *(one.text[start:end] for start, end in one.parts())]
        ids = ids_of(texts, self.tokenizer)
        return [one if isinstance(one, str) else self._sample(one, ids) for one in written]

    def _written(self, cells: Mapping[str, Any]) -> _Written | str:
        try:
            messages = messages_of([cell for name, cell in cells.items() if name != TOOLS])
            tools = _tools(cells.get(TOOLS))
        except RecipeError as error:
            return str(error)
        return self._bounded(messages, tools)

    def _bounded(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, prompt: bool = False
    ) -> _Written | str:
        """A conversation as the template writes it, or what is wrong with it; without an answer, as a ``prompt``."""
        size = sum(len(message.get("content") or "") for message in messages)
        if size > self.most:
            return f"has {size:,} characters, and the max is {self.most:,}: cut it"
        try:
            found = self.write(messages, tools, prompt)
        except Failed as error:
            where = f"{error} for the conversation that begins with {messages[0].get('content')!r:.40}"
            raise RecipeError(f"{self.named} {where}: mend the template, or split the conversation") from error
        except RecursionError:
            return "is nested too deeply"
        return found if isinstance(found, str) else _Written(*found)

    def _write(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool) -> _Written | str:
        """The same without any bound on time and memory."""
        try:
            written = _Written(*self._render(messages, prompt=True)) if prompt else self._with_spans(messages, tools)
            require(bool(written.text), "is written as nothing at all by the chat template")
            _require_text(written.text, self.most)
        except jinja2.TemplateSyntaxError as error:
            said = f"data.chat_template: line {error.lineno} of the template is no Jinja ({error.message}): mend it"
            raise RecipeError(said) from error
        except RecipeError as error:
            return str(error)
        except MemoryError:
            raise
        except Exception as error:  # what a template raises, or Jinja of it
            return f"is refused by the chat template ({reason(error)})"
        return written

    def _with_spans(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> _Written:
        whole, spans = self._render(messages, tools, marked=self.marked and self.loss_on == "assistant")
        if self.loss_on == "all":
            return _Written(whole, [(0, len(whole))])
        if self.marked:
            return _Written(whole, [(start, end) for start, end in spans if start < end])
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:number], tools, prompt=True)
            after, _ = self._render(messages[: number + 1], tools)
            if not (whole.startswith(after) and after.startswith(before)):
                raise RecipeError(
                    f"is written otherwise by the chat template up to message {number + 1} than as a whole, so that "
                    "nobody can say which tokens are the assistant's: give a data.chat_template with {% generation %} "
                    "around its words, as chatml has it, or say data.loss_on all"
                )
            words = after[len(before) :].rstrip()  # what stands behind the end of a turn is not of it
            end = len(before) + len(words) if words.endswith(self.special_texts) else len(after)
            spans += [(len(before), end)] if len(before) < end else []
        return _Written(whole, spans)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        prompt: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        rendered: Any = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.template,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=marked,
            **self.tokenizer.special_tokens_map,
        )
        (text,), spans = rendered
        return text, [*spans[0]] if marked else []

    def _sample(self, written: _Written, ids: Iterator[ndarray]) -> list[Sample] | str:
        """The tokens are those of the whole text, unless one of them is of words on both sides of a border: a model
        that generates has its prompt up to there, so there they are cut."""
        whole, parts = next(ids), written.parts()
        pieces = [next(ids) for _ in parts]
        starts = {start for start, _ in written.spans}
        tokens = np.concatenate(pieces)
        learned = np.repeat([start in starts for start, _ in parts], list(map(len, pieces)))
        if not np.array_equal(tokens, whole) and self._decoded(tokens) != self._decoded(whole):
            # A tokenizer that writes a blank before any text: SentencePiece's.
            tokens, found = whole, self._by_characters(written)
            if found is None:
                return "has words of the assistant that the tokenizer joins with what stands before: mend the template"
            learned = found
        labels = np.where(learned, tokens, IGNORED_LABEL).astype(np.int32)
        lost = max(0, len(tokens) - self.max_length)
        return [Sample(tokens[: self.max_length], labels[: self.max_length], lost)]

    def _decoded(self, ids: ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)

    def _by_characters(self, written: _Written) -> ndarray | None:
        """Which tokens of the whole text are to be predicted; ``None`` where one has characters of two parts."""
        if not self.tokenizer.is_fast:
            return None
        found = self.tokenizer(written.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = np.asarray(found["offset_mapping"]).reshape(-1, 2)
        edges = [edge for span in written.spans for edge in span]
        if any(((places[:, 0] < edge) & (edge < places[:, 1])).any() for edge in edges):
            return None
        return np.any([(start <= places[:, 0]) & (places[:, 1] <= end) for start, end in written.spans], axis=0)

    def prompts(self, texts: Sequence[Any]) -> list[list[int]]:
        chats = [_said(one, "prompt") for one in texts]
        for chat in chats:
            while chat and chat[-1]["role"] == "assistant":  # an answer that is there: the model is to give its own
                chat.pop()
        texts = []
        for found in (self._bounded(chat, prompt=True) for chat in chats):
            if isinstance(found, str):
                raise RecipeError(f"without an answer, it {found}")
            texts.append(found.text)
        return [ids.tolist() for ids in ids_of(texts, self.tokenizer)]


def _template(tokenizer: Any, given: str | None) -> str:
    """The chat template, which the tokenizer has from here on."""
    if given is None:
        try:
            found = tokenizer.get_chat_template()
        except ValueError as error:
            none = (
                "the tokenizer of model.tokenizer has no chat template: give one by data.chat_template, a .jinja file"
            )
            raise RecipeError(f"{none} or its text; or chatml, where it has the token <|im_end|>") from error
        require(isinstance(found, str), f"the chat template of model.tokenizer is no text but {found!r:.40}: mend it")
        return found
    text, path = given, local_path(given)
    if given == "chatml":
        fix = "give a data.chat_template that ends the assistant's words with {{ eos_token }}"
        known = "<|im_end|>" in tokenizer.get_vocab()
        require(known, f"data.chat_template=chatml needs the token <|im_end|>, which model.tokenizer has not: {fix}")
        text = CHATML
    elif "{{" not in given and "{%" not in given:
        try:
            text = read_regular(path, MOST_TEMPLATE).decode()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or reason(error)
            fix = "give the file of one, its text, or chatml"
            raise RecipeError(f"data.chat_template={given!r} is no Jinja text, nor a file ({why}): {fix}") from error
    tokenizer.chat_template = text
    return text


def messages_of(cells: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a row that has them in one cell, or a prompt and a completion."""
    if len(cells) == 2:
        return [
            message for cell, name in zip(cells, ("prompt", "completion"), strict=True) for message in _said(cell, name)
        ]
    return _listed(_parsed(cells[0], "messages"), "messages")


def _tools(cell: Any) -> list[Any] | None:
    """The functions that a model may call, as JSON schemas; ``None`` for none."""
    found = _parsed(cell, TOOLS) or None
    fits = found is None or (isinstance(found, list) and all(isinstance(one, dict) for one in found))
    require(fits, f"has no list of {TOOLS} but {found!r:.40}")
    return found


def _parsed(cell: Any, name: str) -> Any:
    if isinstance(cell, str):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            raise RecipeError(f"has no list of {name} but a text that is no JSON ({cell!r:.40})") from None
    return cell


def _said(cell: Any, name: str) -> list[dict[str, Any]]:
    if isinstance(cell, str):
        require(bool(cell.strip()), f"has an empty {name}")
        return [{"role": "user" if name == "prompt" else "assistant", "content": cell}]
    return _listed(cell, name)


def _listed(cell: Any, name: str) -> list[dict[str, Any]]:
    whole = isinstance(cell, list) and len(cell) > 0
    require(whole, f"has no {name}" if cell in (None, []) else f"has no list of messages but {cell!r:.40}")
    require(len(cell) <= MAX_MESSAGES, f"has {len(cell):,} messages, and the max is {MAX_MESSAGES:,}: split it")
    return [_message(one, f"message {number} of {name}") for number, one in enumerate(cell, start=1)]


def _message(given: Any, name: str) -> dict[str, Any]:
    require(isinstance(given, Mapping), f"has {given!r:.40} for {name}, which must have a role and a content")
    found = {key: value for key, value in given.items() if value is not None}  # a table has what other rows have
    if "from" in found and "role" not in found:
        role = found.pop("from")
        found |= {"role": SHAREGPT.get(role, role) if isinstance(role, str) else role}
        found |= {"content": found.pop("value")} if "value" in found else {}
    role, content = found.get("role"), found.get("content")
    if role not in ROLES:
        raise RecipeError(
            f"has the role {role!r:.40} in {name}, which is none of {', '.join(ROLES)}{nearest(str(role), ROLES)}"
        )
    calls = content is None and "tool_calls" in found
    require(isinstance(content, str) or calls, f"has no text but {content!r:.40} in {name} for its content")
    return found


# Rows of files, as samples in a table on disk.


def told(cell: Any) -> Any:
    """A cell of a table without what it has of other rows: Arrow gives all structs of a column the same keys."""
    if isinstance(cell, Mapping):
        return {key: told(value) for key, value in cell.items() if value is not None}
    return list(map(told, cell)) if isinstance(cell, list) else cell


def tokenised(rows: Rows, reader: RowReader, cache: Path) -> datasets.Dataset:
    """The samples of all rows, from the cache on disk, with their ``row``; of a row without any, what the ``problem``
    is. Of documents without ``labels``: they are the tokens."""
    numbers = ("length", "predicted", "lost", "place", "bytes", "row")
    kinds: dict[str, Any] = {"input_ids": datasets.List(datasets.Value("int32")), "problem": datasets.Value("string")}
    kinds |= {"labels": kinds["input_ids"]} if isinstance(reader, ChatReader) else {}
    kinds |= dict.fromkeys(numbers, datasets.Value("int64"))
    key = hash_of("sequences", *kinds, rows.content, *reader.settings, words_of(reader.tokenizer))

    def pick(found: Sequence[str]) -> Sequence[str]:
        return found if rows.files else reader.columns(rows.source, found)

    def encode_rows(cells: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        make = json.loads if rows.as_json else told
        read = [dict(zip(cells, map(make, one), strict=True)) for one in zip(*cells.values(), strict=True)]
        table: dict[str, list[Any]] = {name: [] for name in kinds}
        nothing = Sample(np.zeros(0, np.int32), np.zeros(0, np.int32))
        for index, found in zip(indices, reader(read), strict=True):
            for sample in [nothing] if isinstance(found, str) else found:
                predicted = int((sample.labels[1:] != IGNORED_LABEL).sum())
                values = sample.ids, found if isinstance(found, str) else "", sample.labels
                counts = len(sample.ids), predicted, *sample[2:], index
                for name, value in zip(("input_ids", "problem", "labels", *numbers), (*values, *counts), strict=True):
                    if name in table:
                        table[name].append(value)
        return table

    return made(rows, key, pick, encode_rows, cache, features=datasets.Features(kinds), batch_size=ROWS_AT_ONCE)


class Sequences:
    """The ``chosen`` samples of ``tables`` that :func:`tokenised` made of ``rows``; on disk, as those of texts."""

    augmented = False

    def __init__(
        self,
        tables: Sequence[datasets.Dataset],
        rows: Sequence[Rows],
        pad: Padder,
        chosen: Sequence[int] | None = None,
    ) -> None:
        self.tables, self.rows, self.pad = tables, rows, pad
        self.starts = [0, *accumulate(map(len, tables))]
        self.table = datasets.concatenate_datasets(list(tables))
        names = [name for name in ("input_ids", "labels") if name in self.table.column_names]
        self.tokens = self.table.select_columns(names)
        self.chosen = range(len(self.table)) if chosen is None else compact(chosen)
        self.lengths = compact(self.column("length"))

    def column(self, name: str) -> ndarray:
        """Of the chosen samples."""
        return self.table.data.column(name).to_numpy()[np.asarray(self.chosen, dtype=np.int64)]

    def of(self, positions: Sequence[int]) -> Sequences:
        """Those of its samples."""
        return Sequences(self.tables, self.rows, self.pad, [self.chosen[position] for position in positions])

    def parted(self, fraction: float, fold: int | None) -> tuple[Sequences, Sequences | None]:
        """Without a share of its rows, and those: all samples of a row stand on one side."""
        if fraction == 0:
            return self, None
        _, rows = np.unique(self.row_numbers(), return_inverse=True)
        _, held = hold_out([0] * (int(rows.max()) + 1), fraction, "data.val_fraction", fold=fold)
        is_held = np.isin(rows, held)
        return self.of(np.flatnonzero(~is_held).tolist()), self.of(np.flatnonzero(is_held).tolist())

    def row_numbers(self) -> ndarray:
        """Of the row of each sample, over all tables."""
        begins = (self.table.data.column("place").to_numpy() == 0).cumsum()
        return begins[np.asarray(self.chosen, dtype=np.int64)]

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of the documents for each token that is predicted; ``None`` of conversations."""
        size = int(self.column("bytes").sum())
        return size / int(self.column("predicted").sum()) if size else None

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self._with_labels(self.tokens[self.chosen[index]])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A whole batch at once."""
        return self.pad(self._with_labels(self.tokens[[self.chosen[index] for index in indices]]))

    def _with_labels(self, found: Mapping[str, Any]) -> dict[str, Any]:
        return {"labels": found["input_ids"], **found}

    def describe(self, index: int) -> str:
        row = self.chosen[index]
        number = bisect_right(self.starts, row) - 1
        return self.rows[number].describe(self.table[row]["row"])

    def fingerprint(self) -> str:
        """Of every token and label (up to 1 GiB; beyond, of evenly spread blocks of samples), in order."""
        content = Content("sequences", np.asarray(self.lengths), self.pad.settings)
        for block in blocks(len(self), 4 * len(self.tokens.column_names) * sum(self.lengths)):
            add_rows(content, self.tokens, [self.chosen[position] for position in block])
        return content.hexdigest()


class FromStream:
    """The first sample of every row of a stream."""

    def __init__(self, reader: RowReader, columns: Sequence[str]) -> None:
        self.reader, self.columns, self.settings = reader, columns, reader.settings

    def __call__(self, rows: Sequence[tuple[Any, ...]], places: Sequence[Callable[[], str]]) -> Mapping[str, list[Any]]:
        samples: list[Sample] = []
        read = [dict(zip(self.columns, map(told, row), strict=True)) for row in rows]
        for found, place in zip(self.reader(read), places, strict=True):
            if isinstance(found, str):
                raise RecipeError(f"{place()} {found}")
            samples.append(found[0])
            if not (samples[-1].labels[1:] != IGNORED_LABEL).any():
                raise RecipeError(f"{place()} {_unlabelled(samples[-1].lost)}")
        return {"input_ids": [one.ids.tolist() for one in samples], "labels": [one.labels.tolist() for one in samples]}


# What is said of it all, before training.


def say(message: str) -> None:
    """Warn, in one line, once a machine."""
    if first_here():
        print(escaped(f"trainer: warning: {message}"), file=sys.stderr, flush=True)


def _unlabelled(lost: int) -> str:
    return CUT if lost else "has no word of the assistant"


class Survey:
    """Says what each split holds, and what is cut off or left out of it."""

    def __init__(self, called: str, max_length: int) -> None:
        self.called, self.max_length, self.bad, self.learned = called, max_length, list[str](), True

    def __call__(self, part: str, every: Sequences) -> list[int]:
        """The samples of ``every`` that there is something to learn from."""
        problems = every.table.data.column("problem")
        usable, empty = pc.equal(problems, "").to_numpy(), pc.equal(problems, EMPTY).to_numpy()
        predicted, lost, first = every.column("predicted"), every.column("lost"), every.column("place") == 0
        silent, learned = usable & (predicted == 0), usable & (predicted > 0)
        tokens = int(every.column("length")[learned].sum()) - int((learned & ~first).sum())
        said = f"data: {part}: {self._counted(int((learned & first).sum()))}, {tokens:,} tokens, of which "
        said += f"{int(predicted[learned].sum()):,} are predicted"
        if int((learned & ~first).sum()):
            said += f", in {int(learned.sum()):,} pieces of at most {self.max_length:,}"
        if first_here():
            print(escaped(said), flush=True)
        cut = learned & (lost > 0)
        fix = f"raise data.max_length={self.max_length}"
        self._tell(part, every, cut, f"are cut, by {int(lost[cut].sum()):,} tokens: {fix}")
        self._tell(part, every, empty, "are empty, and left out")
        for index in np.flatnonzero(silent | ~(usable | empty)).tolist():
            why = problems[index].as_py() or _unlabelled(int(lost[index]))
            self.bad.append(f"{every.describe(index)} {why}")
        self.learned &= bool(learned.any())
        return np.flatnonzero(learned).tolist()

    def _counted(self, count: int) -> str:
        return f"{count:,} {self.called}{'s' * (count != 1)}"

    def _tell(self, part: str, every: Sequences, chosen: ndarray, what: str) -> None:
        if chosen.any():
            found = _brief([every.describe(index) for index in np.flatnonzero(chosen)[:SHOWN].tolist()])
            names = ", ".join(found) + (", …" if chosen.sum() > SHOWN else "")
            say(f"{part}: {int(chosen.sum()):,} of {len(every):,} {self.called}s {what} ({names})")

    def check(self, most: int) -> None:
        """Name the samples that are left out, or refuse them where they are more than ``most``."""
        count = len(self.bad)
        shown = "; ".join(_brief(self.bad[:SHOWN])) + (f"; and {count - SHOWN:,} more" if count > SHOWN else "")
        said = f"{self._counted(count)} cannot be learned from"
        fix = f", raise data.max_length={self.max_length}" if any(why.endswith(CUT) for why in self.bad) else ""
        fix += f", or leave them out by --data.max_bad_samples {count}" if self.learned else ""
        require(count <= most, f"{said}, more than data.max_bad_samples={most}: {shown}. Mend or remove them{fix}")
        if self.bad:
            say(f"{said}, and are left out: {shown}")


def _brief(places: Sequence[str]) -> list[str]:
    """Rows that are named, of which only the first says how they are counted."""
    return [*places[:1], *(sub(r" \(the (first|header) is row[^)]*\)", "", place) for place in places[1:])]
