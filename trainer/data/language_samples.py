"""Samples of language models: tokenisation of rows, their labels, and the summary before training."""

from __future__ import annotations

import copy
import json
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from re import search
from typing import Any, NamedTuple

import datasets
import jinja2
import numpy as np
import pyarrow.compute as pc
import torch
from numpy import ndarray
from torch import Tensor
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.contract import Samples
from trainer.data import tokens
from trainer.data.base import hold_out, local_path, root_cause
from trainer.data.cache import hash_of
from trainer.data.fingerprint import ContentHasher, add_rows, sample_row_blocks
from trainer.data.rows import (
    ALPACA,
    PAIR_COLUMNS,
    RowSource,
    brief_places,
    check_columns,
    find_chat_columns,
    find_pair_columns,
    has_text,
)
from trainer.errors import RecipeError, require, suggest_name
from trainer.system.child_jobs import Bounded, ChildError
from trainer.system.environment import is_local_rank_zero
from trainer.system.files import read_regular
from trainer.system.status_line import say
from trainer.system.text import escaped
from trainer.values import IGNORED_LABEL

MAX_DOCUMENT_CHARS = 10_000_000  # per document: it is tokenised as a whole, with over 100 bytes per character
MAX_MESSAGES = 5_000  # per conversation
SECONDS, MEMORY = 10.0, 800_000_000  # max CPU time in seconds and memory in bytes of a chat template to render it
WRITERS: dict[str, Bounded] = {}  # renderers in this process, by a hash of everything that determines their output
ROWS_AT_ONCE, MAX_TEMPLATE_BYTES, MAX_SHOWN = 128, 1_000_000, 5
EMPTY_REASON, TRUNCATED_REASON = "is empty", "has no text of the assistant within data.max_length"

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOLS = "tools"
SHAREGPT = {"human": "user", "gpt": "assistant", "function_response": "tool"}

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)

Spans = list[tuple[int, int]]  # start and end of characters
Messages = list[dict[str, Any]]


class Sample(NamedTuple):
    """One sequence of tokens."""

    ids: ndarray  # int32 (length,)
    labels: ndarray  # int32 (length,), not shifted; -100 for tokens that are not predicted
    num_truncated: int = 0  # number of tokens that were truncated after these
    piece_index: int = 0  # index of this piece of a document
    bytes: int = 0  # UTF-8 bytes of the document, only set in its first piece


def make_padder(tokenizer: Any, max_length: int) -> tokens.Padder:
    """Return a padder that always pads on the right, with any token if there is no padding token: it is masked."""
    if tokenizer is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.padding_side = "right"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokens.check_tokenizer(tokenizer, max_length)
    return tokens.Padder(tokenizer, max_length)


def encode_texts(texts: Sequence[str], tokenizer: Any) -> Iterator[ndarray]:
    """Yield the tokens of each text, without special tokens except those written in the text."""
    for chunk in tokens.text_batches(texts) if texts else ():
        encoded = tokens.run_tokenizer(tokenizer, chunk, add_special_tokens=False, return_token_type_ids=False)
        yield from (np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"])


def _require_text(text: Any, most: int) -> None:
    require(isinstance(text, str), f"has {text!r:.40} instead of a text")
    require(len(text) <= most, f"has {len(text):,} characters, and the max is {most:,}: cut it")
    require(text.encode(errors="replace").decode() == text, "is not UTF-8 text")


class DocumentReader:
    """Reads a text, followed by the tokenizer's end of text, in pieces that overlap by one token."""

    settings: list[Any]
    """Everything except the tokenizer that determines the samples, as JSON values."""
    ends: Sequence[int] = ()  # tokens after a text to continue

    def __init__(self, tokenizer: Any, max_length: int, column: str) -> None:
        self.tokenizer, self.max_length, self.column, self.end = tokenizer, max_length, column, tokenizer.eos_token_id
        cause = "the tokenizer of model.tokenizer has no end of text (eos_token), which must follow each document"
        require(self.end is not None, f"{cause}: choose another")
        self.begin = [one for one in tokenizer("")["input_ids"] if one != self.end]
        self.settings = ["documents", column, max_length]

    def columns(self, source: str, found: Sequence[str]) -> Sequence[str]:
        """Return the columns to read from those ``found``."""
        check_columns(source, found, text_column=self.column)
        return [self.column]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Sample] | str]:
        """Return the samples of each row, which maps columns to cells, or the reason why it is invalid."""
        problems = [self._find_problem(*cells.values()) for cells in rows]
        texts = [next(iter(cells.values())) for cells, why in zip(rows, problems, strict=True) if not why]
        found = zip(texts, encode_texts(texts, self.tokenizer), strict=True)
        return [why or self._pieces(*next(found)) or EMPTY_REASON for why in problems]

    def _find_problem(self, text: Any, problem: str = "") -> str:
        try:
            if text is not None and not problem:
                _require_text(text, MAX_DOCUMENT_CHARS)
        except RecipeError as error:
            return str(error)
        return problem or ("" if text and text.strip() else EMPTY_REASON)

    def _pieces(self, text: str, words: ndarray) -> list[Sample]:
        ids, size = np.array([*self.begin, *words, self.end], dtype=np.int32), len(text.encode())
        pieces = [ids[start : start + self.max_length] for start in range(0, len(ids) - 1, self.max_length - 1)]
        return [Sample(piece, piece, 0, place, 0 if place else size) for place, piece in enumerate(pieces)]

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts to continue."""
        return [[*self.begin, *ids.tolist(), *self.ends] for ids in encode_texts(texts, self.tokenizer)]


class MaskedDocumentReader(DocumentReader):
    """Reads a text in pieces without overlap, each between the special tokens of the tokenizer."""

    def __init__(self, tokenizer: Any, max_length: int, column: str) -> None:
        self.tokenizer, self.column, around = tokenizer, column, tokenizer("")["input_ids"]
        starts = tokenizer.cls_token_id, tokenizer.bos_token_id
        self.begin, self.ends = [one for one in around if one in starts], [one for one in around if one not in starts]
        self.room = max_length - len(around)
        cause = f"data.max_length={max_length} leaves no room for text, with {len(around)} special tokens"
        require(self.room > 0, f"{cause}: raise it")
        self.settings = ["masked documents", column, max_length]

    def _pieces(self, text: str, words: ndarray) -> list[Sample]:
        found, size = list[Sample](), len(text.encode())
        for place, start in enumerate(range(0, len(words), self.room)):
            ids = np.array([*self.begin, *words[start : start + self.room], *self.ends], dtype=np.int32)
            labels = ids.copy()
            labels[: len(self.begin)] = labels[len(ids) - len(self.ends) :] = IGNORED_LABEL
            found.append(Sample(ids, labels, 0, place, 0 if place else size))
        return found


class _RenderedChat(NamedTuple):
    text: str
    spans: Spans  # to predict

    def parts(self) -> Spans:
        """Return the spans and the gaps between them."""
        return list(pairwise(sorted({0, len(self.text), *chain.from_iterable(self.spans)})))


class ChatReader:
    """Reads conversations rendered by the chat template; the assistant's text is predicted."""

    def __init__(
        self, tokenizer: Any, max_length: int, column: str | None, pair: tuple[str, str], template: Any, loss_on: str
    ) -> None:
        self.tokenizer, self.max_length, self.column, self.pair = tokenizer, max_length, column, pair
        self.template, self.loss_on = _template(tokenizer, template), loss_on
        self.marked = search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        self.unwritten = set[str]()  # sources with a column of tools that the template ignores
        added = tokenizer.get_added_vocab()
        self.special = {*added.values(), *tokenizer.all_special_ids}
        self.special_texts = tuple(filter(None, {*added, *tokenizer.all_special_tokens}))
        self.settings = ["conversations", column, *pair, max_length, self.template, loss_on]
        self.most = tokens.max_chars(max_length)
        own = f"the chat template of model.tokenizer ({tokenizer.name_or_path})"
        self.named = own if template is None else f"data.chat_template={template[:300]!r}"
        self.write: Callable[..., Any] = self._write
        if self.template not in (CHATML, PLAIN):  # a template is a program, possibly from an untrusted source
            key = hash_of(*self.settings, tokenizer.special_tokens_map, sorted(self.special_texts))
            self.write = WRITERS.setdefault(key, Bounded(self._write, SECONDS, MEMORY))
        self._probe_turn_end(template)

    def _probe_turn_end(self, given: str | None) -> None:
        """Render a short conversation to find how the template ends a turn of the assistant."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        (found,) = ChatReader.__call__(self, [{"messages": messages}])
        if isinstance(found, str) or self.loss_on == "all" or found[0].num_truncated:
            return
        last = found[0].labels[found[0].labels != IGNORED_LABEL][-1:].tolist()
        if last and last[0] in self.special:
            if given is not None:  # the token at which a served model must stop
                self.tokenizer.eos_token = self.tokenizer.convert_ids_to_tokens(last[0])
            return
        cause = "the chat template does not end the assistant's turn with a trained token, so the model does not learn"
        warn_once(f"{cause} to stop: give a data.chat_template that ends its text with {{{{ eos_token }}}}")

    def columns(self, source: str, found: Sequence[str]) -> Sequence[str]:
        tools = [TOOLS] if TOOLS in found else []
        if tools and TOOLS not in self.template and source not in self.unwritten:
            self.unwritten.add(source)
            warn_once(f"{source} has a column {TOOLS}, which the chat template ignores: give another one")
        return [*find_chat_columns(source, found, self.column, self.pair), *tools]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Sample] | str]:
        return self._encoded([self._render_row(cells) for cells in rows])

    def _encoded(self, written: Sequence[_RenderedChat | str]) -> list[list[Sample] | str]:
        chats = [one for one in written if isinstance(one, _RenderedChat)]
        texts = [text for one in chats for text in (one.text, *(one.text[start:end] for start, end in one.parts()))]
        ids = encode_texts(texts, self.tokenizer)
        return [one if isinstance(one, str) else self._sample(one, ids) for one in written]

    def _message_cells(self, cells: Mapping[str, Any]) -> list[Any]:
        """Return the cell of the messages, or those of prompt and completion. Alpaca's context follows its prompt."""
        if self.column is not None or not {*ALPACA[::2]} <= cells.keys() or {*self.pair} <= cells.keys():
            return [cell for name, cell in cells.items() if name != TOOLS]
        prompt, context, answer = (cells.get(name) for name in ALPACA)
        if isinstance(prompt, str) and isinstance(context, str) and context.strip():
            prompt = f"{prompt}\n\n{context}"
        return [prompt, answer]

    def _render_row(self, cells: Mapping[str, Any]) -> _RenderedChat | str:
        try:
            parsed = messages_of(self._message_cells(cells)), _tools(cells.get(TOOLS))
        except RecipeError as error:
            return str(error)
        return self._bounded(*parsed)

    def _bounded(self, messages: Messages, tools: Any = None, prompt: bool = False) -> _RenderedChat | str:
        """Render with bounded time and memory, or return what is wrong. With ``prompt``, stop before the answer."""
        size = sum(len(message.get("content") or "") for message in messages)
        if size > self.most:
            return f"has {size:,} characters, and the max is {self.most:,}: cut it"
        try:
            found = self.write(messages, tools, prompt)
        except ChildError as error:
            where = f"{error} for the conversation that begins with {messages[0].get('content')!r:.40}"
            raise RecipeError(f"{self.named} {where}: fix the template, or split the conversation") from error
        except RecursionError:
            return "is nested too deeply"
        return found if isinstance(found, str) else _RenderedChat(*found)

    def _write(self, messages: Messages, tools: list[Any] | None, prompt: bool) -> _RenderedChat | str:
        """Do the same without bounds on time and memory."""
        try:
            written = self._render(messages, prompt=True) if prompt else self._with_spans(messages, tools)
            require(bool(written.text), "is rendered as an empty text by the chat template")
            _require_text(written.text, self.most)
        except jinja2.TemplateSyntaxError as error:
            where = f"data.chat_template: line {error.lineno} of the template"
            raise RecipeError(f"{where} is not valid Jinja ({error.message}): fix it") from error
        except RecipeError as error:
            return str(error)
        except MemoryError:
            raise
        except Exception as error:  # raised by the template, or by Jinja
            return f"is rejected by the chat template ({root_cause(error)})"
        return written

    def _with_spans(self, messages: Messages, tools: list[Any] | None) -> _RenderedChat:
        whole, spans = self._render(messages, tools, marked=self.marked and self.loss_on == "assistant")
        if self.loss_on == "all":
            return _RenderedChat(whole, [(0, len(whole))])
        if self.marked:
            return _RenderedChat(whole, [(start, end) for start, end in spans if start < end])
        answers = (number for number, message in enumerate(messages) if message["role"] == "assistant")
        for number in answers:
            before, _ = self._render(messages[:number], tools, prompt=True)
            after, _ = self._render(messages[: number + 1], tools)
            cause = f"is rendered differently by the chat template up to message {number + 1} than as a whole"
            fix = "give a data.chat_template with {% generation %} around answers, or set data.loss_on all"
            require(whole.startswith(after) and after.startswith(before), f"{cause}: {fix}")
            words = after[len(before) :].rstrip()  # space after the end of a turn does not belong to it
            end = len(before) + len(words) if words.endswith(self.special_texts) else len(after)
            spans += [(len(before), end)] if len(before) < end else []
        return _RenderedChat(whole, spans)

    def _render(
        self, messages: Messages, tools: Any = None, prompt: bool = False, marked: bool = False
    ) -> _RenderedChat:
        options: Any = {"add_generation_prompt": prompt, "return_assistant_tokens_mask": marked}
        options |= {"chat_template": self.template, "tools": tools, **self.tokenizer.special_tokens_map}
        rendered: Any = render_jinja_template(conversations=[messages], **options)
        (text,), spans = rendered
        return _RenderedChat(text, [*spans[0]] if marked else [])

    def _sample(self, written: _RenderedChat, ids: Iterator[ndarray]) -> list[Sample] | str:
        """Tokenise the whole text, or its parts if a token crosses the border of a span, as prompts end there."""
        whole, parts = next(ids), written.parts()
        pieces = [next(ids) for _ in parts]
        starts, joined = {start for start, _ in written.spans}, np.concatenate(pieces)
        learned: Any = np.repeat([start in starts for start, _ in parts], list(map(len, pieces)))
        if not np.array_equal(joined, whole) and self._decoded(joined) != self._decoded(whole):
            # A tokenizer that adds a space before every text, such as SentencePiece's.
            joined, learned = whole, self._mask_from_offsets(written)
            if learned is None:
                return "has text of the assistant that shares a token with the text before it: fix the template"
        labels = np.where(learned, joined, IGNORED_LABEL).astype(np.int32)
        return [Sample(joined[: self.max_length], labels[: self.max_length], max(0, len(joined) - self.max_length))]

    def _decoded(self, ids: ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)

    def _mask_from_offsets(self, written: _RenderedChat) -> ndarray | None:
        """Return which tokens of the whole text are predicted; ``None`` if a token has characters of two parts."""
        if not self.tokenizer.is_fast:
            return None
        found = self.tokenizer(written.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = np.asarray(found["offset_mapping"]).reshape(-1, 2)
        if any(((places[:, 0] < edge) & (edge < places[:, 1])).any() for span in written.spans for edge in span):
            return None
        return np.any([(start <= places[:, 0]) & (places[:, 1] <= end) for start, end in written.spans], axis=0)

    def prompts(self, texts: Sequence[Any]) -> list[list[int]]:
        """Return the tokens of user texts or lists of messages to continue."""
        chats = [_parse_content(one, "prompt") for one in texts]
        for chat in chats:  # drop existing answers, because the model generates its own
            while chat and chat[-1]["role"] == "assistant":
                chat.pop()
        texts = []
        for found in (self._bounded(chat, prompt=True) for chat in chats):
            if isinstance(found, str):
                raise RecipeError(f"the conversation without an answer {found}")
            texts.append(found.text)
        return [ids.tolist() for ids in encode_texts(texts, self.tokenizer)]


RowReader = DocumentReader | ChatReader  # converts rows to samples


class PreferenceReader(ChatReader):
    """Reads a chosen and a rejected answer as two samples of a row; only what the assistant adds is predicted."""

    def __init__(self, tokenizer: Any, max_length: int, wanted: Mapping[str, str | None], template: Any) -> None:
        self.wanted = dict(wanted)
        super().__init__(tokenizer, max_length, None, ("prompt", "completion"), template, "assistant")
        self.settings = ["preferences", *self.wanted.values(), *self.settings]

    def columns(self, source: str, found: Sequence[str]) -> Sequence[str]:
        return list(find_pair_columns(source, found, self.wanted).values())

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Sample] | str]:
        found = self._encoded([one for cells in rows for one in self._render_pair(cells)])
        return [self._joined(*pair) for pair in zip(found[::2], found[1::2], strict=True)]

    def _render_pair(self, cells: Mapping[str, Any]) -> list[_RenderedChat | str]:
        columns = find_pair_columns("the table", list(cells), self.wanted)
        try:
            prompt, *answers = _pair_of(*(cells.get(columns.get(role, "")) for role in PAIR_COLUMNS))
        except RecipeError as error:
            return [str(error)] * 2
        return [self._render_answer(prompt, answer) for answer in answers]

    def _render_answer(self, prompt: Messages, answer: Messages) -> _RenderedChat | str:
        """Render both, and keep the spans of ``answer``, which are the last."""
        written = self._bounded([*prompt, *answer])
        if isinstance(written, str):
            return written
        before, added = (sum(message["role"] == "assistant" for message in part) for part in (prompt, answer))
        if len(written.spans) != before + added:
            return f"has {before + added} texts of the assistant, but the chat template marks {len(written.spans)}"
        return written._replace(spans=written.spans[before:])

    def _joined(self, chosen: list[Sample] | str, rejected: list[Sample] | str) -> list[Sample] | str:
        for name, found in (("chosen", chosen), ("rejected", rejected)):
            if isinstance(found, str):
                return found
            if not (found[0].labels[1:] != IGNORED_LABEL).any():
                return f"has a {name} answer that {_no_label_message(found[0].num_truncated)}"
        return [chosen[0], rejected[0]._replace(piece_index=1)]  # type: ignore[union-attr, list-item]


def _pair_of(chosen: Any, rejected: Any, prompt: Any, system: Any) -> tuple[Messages, Messages, Messages]:
    """Return the messages of the prompt, and those that each answer adds."""
    both = [_parse_content(cell, name) for cell, name in ((chosen, "chosen"), (rejected, "rejected"))]
    begin = [{"role": "system", "content": system}] if has_text(system) else []
    if any(one[0]["role"] != "assistant" for one in both):  # whole conversations, which repeat the prompt
        size = 0
        while size < min(map(len, both)) - 1 and both[0][size] == both[1][size]:
            size += 1
        begin, both = [*begin, *both[0][:size]], [one[size:] for one in both]
    elif prompt is not None:
        begin += _parse_content(prompt, "prompt")
    require(any(one["role"] != "system" for one in begin), "has no prompt, and its answers share no messages")
    require(both[0] != both[1], "has equal chosen and rejected answers")
    return begin, both[0], both[1]


def _template(tokenizer: Any, given: str | None) -> str:
    """Return the chat template; a ``given`` one is also set in the tokenizer."""
    if given is None:
        try:
            found = tokenizer.get_chat_template()
        except ValueError as error:
            fix = "set data.chat_template to a .jinja file, its text, or chatml if the tokenizer has <|im_end|>"
            raise RecipeError(f"the tokenizer of model.tokenizer has no chat template: {fix}") from error
        require(isinstance(found, str), f"the chat template of model.tokenizer is {found!r:.40}, not a text: fix it")
        return found
    text, path = given, local_path(given)
    if given == "chatml":
        cause = "data.chat_template=chatml needs the token <|im_end|>, which model.tokenizer lacks"
        fix = "give a template that ends the assistant's text with {{ eos_token }}"
        require("<|im_end|>" in tokenizer.get_vocab(), f"{cause}: {fix}")
        text = CHATML
    elif given == "plain":
        text = PLAIN
    elif "{{" not in given and "{%" not in given:
        try:
            text = read_regular(path, MAX_TEMPLATE_BYTES).decode()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or root_cause(error)
            wrong = f"data.chat_template={given!r} is neither Jinja text nor a readable file ({why})"
            raise RecipeError(f"{wrong}: give a Jinja file, its text, chatml or plain") from error
    tokenizer.chat_template = text
    return text


def messages_of(cells: Sequence[Any]) -> Messages:
    """Return the messages of a row, from one cell, or from a prompt and a completion."""
    if len(cells) == 2:
        return [*_parse_content(cells[0], "prompt"), *_parse_content(cells[1], "completion")]
    return _parse_messages(_parsed(cells[0], "messages"), "messages")


def _tools(cell: Any) -> list[Any] | None:
    found = _parsed(cell, TOOLS) or None
    fits = found is None or (isinstance(found, list) and all(isinstance(one, dict) for one in found))
    require(fits, f"has {found!r:.40} instead of a list of {TOOLS}")
    return found


def _parsed(cell: Any, name: str) -> Any:
    if isinstance(cell, str):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            raise RecipeError(f"has a text that is not JSON ({cell!r:.40}) instead of a list of {name}") from None
    return cell


def _parse_content(cell: Any, name: str) -> Messages:
    if isinstance(cell, str):
        require(bool(cell.strip()), f"has an empty {name}")
        return [{"role": "user" if name == "prompt" else "assistant", "content": cell}]
    return _parse_messages(cell, name)


def _parse_messages(cell: Any, name: str) -> Messages:
    if not isinstance(cell, list) or not cell:
        raise RecipeError(f"has no {name}" if cell in (None, []) else f"has {cell!r:.40} instead of a list of messages")
    require(len(cell) <= MAX_MESSAGES, f"has {len(cell):,} messages, and the max is {MAX_MESSAGES:,}: split it")
    return [_parse_message(one, f"message {number} of {name}") for number, one in enumerate(cell, start=1)]


def _parse_message(given: Any, name: str) -> dict[str, Any]:
    require(isinstance(given, Mapping), f"has {given!r:.40} for {name}, which must have a role and a content")
    found = {key: value for key, value in given.items() if value is not None}  # keys that only other rows use
    if "from" in found and "role" not in found:
        role = found.pop("from")
        found |= {"role": SHAREGPT.get(role, role) if isinstance(role, str) else role}
        found |= {"content": found.pop("value")} if "value" in found else {}
    role, content = found.get("role"), found.get("content")
    if role not in ROLES:
        known = f"{', '.join(ROLES)}{suggest_name(str(role), ROLES)}"
        raise RecipeError(f"has the role {role!r:.40} in {name}, which must be one of {known}")
    fits = isinstance(content, str) or (content is None and "tool_calls" in found)
    require(fits, f"has {content!r:.40} instead of a text in {name} for its content")
    return found


def drop_nulls(cell: Any) -> Any:
    """Remove keys that only other rows use. Arrow gives all structs of a column the same keys, with ``None``."""
    if isinstance(cell, Mapping):
        return {key: drop_nulls(value) for key, value in cell.items() if value is not None}
    return list(map(drop_nulls, cell)) if isinstance(cell, list) else cell


def tokenize_rows(rows: RowSource, reader: RowReader, cache: Path) -> datasets.Dataset:
    """Return the samples of all rows with their ``row``, using the cache on disk. A row without samples has a
    ``problem``. Documents have no ``labels``, because these equal the tokens."""
    numbers = ("length", "predicted", "lost", "place", "bytes", "row")
    kinds: dict[str, Any] = {"input_ids": datasets.List(datasets.Value("int32")), "problem": datasets.Value("string")}
    kinds |= {"labels": kinds["input_ids"]} if isinstance(reader, ChatReader) else {}
    kinds |= dict.fromkeys(numbers, datasets.Value("int64"))
    key = hash_of("sequences", *kinds, rows.content, *reader.settings, tokens.tokenizer_state_hash(reader.tokenizer))

    def pick(found: Sequence[str]) -> Sequence[str]:
        return found if rows.files else reader.columns(rows.source, found)

    def encode_rows(cells: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        make = json.loads if rows.as_json else drop_nulls
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

    options = {"features": datasets.Features(kinds), "batch_size": ROWS_AT_ONCE}
    return tokens.build_table(rows, key, pick, encode_rows, cache, **options)


class Sequences(Samples):
    """The ``chosen`` samples of ``tables`` that :func:`tokenize_rows` made from ``rows``; memory-mapped."""

    lengths: Sequence[int]
    chosen: Sequence[int]

    def __init__(
        self, tables: Sequence[datasets.Dataset], rows: Sequence[RowSource], pad: tokens.Padder, chosen: Any = None
    ) -> None:
        self.tables, self.rows, self.pad = tables, rows, pad
        self.starts = [0, *accumulate(map(len, tables))]
        self.table = datasets.concatenate_datasets(list(tables))
        names = [name for name in ("input_ids", "labels") if name in self.table.column_names]
        self.tokens = self.table.select_columns(names)
        self.chosen = range(len(self.table)) if chosen is None else tokens.to_int64_array(chosen)
        self.lengths = tokens.to_int64_array(self.column("length"))

    def column(self, name: str) -> ndarray:
        """Return a column of the chosen samples."""
        return self.table.data.column(name).to_numpy()[np.asarray(self.chosen, dtype=np.int64)]

    def of(self, positions: Sequence[int]) -> Sequences:
        """Return a split of the samples at ``positions``."""
        return Sequences(self.tables, self.rows, self.pad, [self.chosen[position] for position in positions])

    def split_off(self, fraction: float, fold: int | None) -> tuple[Sequences, Sequences | None]:
        """Split into kept and held-out samples. All samples of a row are on the same side."""
        if fraction == 0:
            return self, None
        numbers = (self.table.data.column("place").to_numpy() == 0).cumsum()  # the number of each row
        _, rows = np.unique(numbers[np.asarray(self.chosen, dtype=np.int64)], return_inverse=True)
        _, held = hold_out([0] * (int(rows.max()) + 1), fraction, "data.val_fraction", fold=fold)
        is_held = np.isin(rows, held)
        return self.of(np.flatnonzero(~is_held).tolist()), self.of(np.flatnonzero(is_held).tolist())

    @property
    def bytes_per_token(self) -> float | None:  # type: ignore[override]
        """Bytes of the documents per predicted token; ``None`` for conversations."""
        size = int(self.column("bytes").sum())
        return size / int(self.column("predicted").sum()) if size else None

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self._with_labels(self.tokens[self.chosen[index]])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return self.pad(self._with_labels(self.tokens[[self.chosen[index] for index in indices]]))

    def _with_labels(self, found: Mapping[str, Any]) -> dict[str, Any]:
        return {"labels": found["input_ids"], **found}

    def describe(self, index: int) -> str:
        row = self.chosen[index]
        return self.rows[bisect_right(self.starts, row) - 1].describe(self.table[row]["row"])

    def fingerprint(self) -> str:
        """Hash every token and label, in order; above 1 GiB, evenly spread blocks of samples."""
        content = ContentHasher("sequences", np.asarray(self.lengths), self.pad.settings)
        for block in sample_row_blocks(len(self), 4 * len(self.tokens.column_names) * sum(self.lengths)):
            add_rows(content, self.tokens, [self.chosen[position] for position in block])
        return content.hexdigest()


class Pairs(Samples):
    """Pairs of successive ``sequences``, a chosen and a rejected text, with their log-probabilities ``reference``.

    A batch has the tensors of both texts, ``(n, 2, length)``, and ``reference``, float64 ``(n, 2)``; NaN if unknown.
    """

    def __init__(self, sequences: Sequences, packs: bool) -> None:
        self.sequences, tokens_of = sequences, np.asarray(sequences.lengths).reshape(-1, 2)
        self.lengths = tokens.to_int64_array(tokens_of.sum(1) if packs else 2 * tokens_of.max(1))
        self.reference = np.full(tokens_of.shape, np.nan)

    def __len__(self) -> int:
        return len(self.reference)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[0] for name, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        batch = self.sequences.__getitems__([place for index in indices for place in (2 * index, 2 * index + 1)])
        pairs = {name: value.unflatten(0, (-1, 2)) for name, value in batch.items()}
        return {**pairs, "reference": torch.from_numpy(self.reference[list(indices)])}

    def describe(self, index: int) -> str:
        return self.sequences.describe(2 * index)

    def fingerprint(self) -> str:
        return self.sequences.fingerprint()


class FirstSamplePerRow:
    """Encodes each row of a stream as its first sample."""

    def __init__(self, reader: RowReader, columns: Sequence[str]) -> None:
        self.reader, self.columns, self.settings = reader, columns, reader.settings

    def __call__(self, rows: Sequence[tuple[Any, ...]], places: Sequence[Callable[[], str]]) -> Mapping[str, list[Any]]:
        samples: list[Sample] = []
        read = [dict(zip(self.columns, map(drop_nulls, row), strict=True)) for row in rows]
        for found, place in zip(self.reader(read), places, strict=True):
            if isinstance(found, str):
                raise RecipeError(f"{place()} {found}")
            samples.append(found[0])
            if not (found[0].labels[1:] != IGNORED_LABEL).any():
                raise RecipeError(f"{place()} {_no_label_message(found[0].num_truncated)}")
        return {"input_ids": [one.ids.tolist() for one in samples], "labels": [one.labels.tolist() for one in samples]}


def warn_once(message: str) -> None:
    """Print a one-line warning, once per machine."""
    if is_local_rank_zero():
        print(escaped(f"trainer: warning: {message}"), file=sys.stderr, flush=True)


def _no_label_message(lost: int) -> str:
    return TRUNCATED_REASON if lost else "has no text of the assistant"


class TruncationReport:
    """Prints a summary of each split, and what is truncated or skipped."""

    def __init__(self, called: str, max_length: int, reader: RowReader) -> None:
        self.called, self.max_length, self.bad, self.learned = called, max_length, list[str](), True
        self.masks = isinstance(reader, MaskedDocumentReader)

    def __call__(self, part: str, every: Sequences) -> list[int]:
        """Return the positions of the samples of ``every`` that have tokens to predict."""
        problems = every.table.data.column("problem")
        usable, empty = pc.equal(problems, "").to_numpy(), pc.equal(problems, EMPTY_REASON).to_numpy()
        predicted, lost, first = every.column("predicted"), every.column("lost"), every.column("place") == 0
        silent, learned = usable & (predicted == 0), usable & (predicted > 0)
        # Further pieces of a document repeat a token.
        further = int((learned & ~first).sum()) if self.called == "document" else 0
        words = int(predicted[learned].sum())
        size = words if self.masks else int(every.column("length")[learned].sum()) - further
        said = f"data: {part}: {self._format_count(int((learned & first).sum()))}, {size:,} tokens"
        said += "" if self.masks else f" ({words:,} predicted)"
        said += f", in {int(learned.sum()):,} pieces of at most {self.max_length:,}" if further else ""
        if is_local_rank_zero():
            say(escaped(said))
        cut = learned & (lost > 0)
        fix = f"raise data.max_length={self.max_length}"
        self._report_split(part, every, cut, f"are truncated, by {int(lost[cut].sum()):,} tokens: {fix}")
        self._report_split(part, every, empty, "are empty and skipped")
        for index in np.flatnonzero(silent | ~(usable | empty)).tolist():
            self.bad.append(f"{every.describe(index)} {problems[index].as_py() or _no_label_message(int(lost[index]))}")
        self.learned &= bool(learned.any())
        return np.flatnonzero(learned).tolist()

    def _format_count(self, count: int) -> str:
        return f"{count:,} {self.called}{'s' * (count != 1)}"

    def _report_split(self, part: str, every: Sequences, chosen: ndarray, what: str) -> None:
        if chosen.any():
            first = np.flatnonzero(chosen)[: 2 * MAX_SHOWN + 1].tolist()
            rows = [*dict.fromkeys(map(every.describe, first))]  # both answers of a pair are in one row
            names = ", ".join(brief_places(rows[:MAX_SHOWN])) + (", …" if len(rows) > MAX_SHOWN else "")
            noun = "answer" if self.called == "pair" else self.called
            warn_once(f"{part}: {int(chosen.sum()):,} of {len(every):,} {noun}s {what} ({names})")

    def check(self, max_bad: int) -> None:
        """Warn about the samples that are skipped, or reject them if they are more than ``max_bad``."""
        count = len(self.bad)
        shown = "; ".join(brief_places(self.bad[:MAX_SHOWN]))
        shown += f"; and {count - MAX_SHOWN:,} more" if count > MAX_SHOWN else ""
        said = f"{self._format_count(count)} cannot be learned from"
        is_short = any(why.endswith(TRUNCATED_REASON) for why in self.bad)
        fix = f", raise data.max_length={self.max_length}" if is_short else ""
        fix += f", or skip them with --data.max_bad_samples {count}" if self.learned else ""
        require(count <= max_bad, f"{said}, more than data.max_bad_samples={max_bad}: {shown}. Fix or remove them{fix}")
        if self.bad:
            warn_once(f"{said} and are skipped: {shown}")
