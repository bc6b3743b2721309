"""Conversations and documents: exactly the tokens that are to be learned, and each row that is not learned is named."""

import json
import pickle
from pathlib import Path

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.prepared import prepared, refused
from helpers.tokenizers import byte_pairs, sentence_pieces
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.data import Conversations, Documents, Mixture
from trainer.data.fingerprint import fingerprint
from trainer.data.language_samples import CHATML
from trainer.data.loader import Loader
from trainer.errors import RecipeError
from trainer.models.byte_tokenizer import byte_tokenizer
from trainer.values import PartialBatch, Request

CHATS = [
    [("user", "what is the answer?"), ("assistant", "the answer is forty two.")],
    [("system", "good"), ("user", "hello"), ("assistant", "hello world"), ("user", "a film"), ("assistant", "a book")],
    [("user", "hello world"), ("assistant", "\n\nhello world\n"), ("user", "good")],  # begins with a line break
]
PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same, but nothing says which words are the assistant's."""


def messages(chat):
    return [{"role": role, "content": content} for role, content in chat]


ROWS = [{"messages": messages(chat)} for chat in CHATS]


def jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def chats(tmp_path):
    """A function that prepares :class:`Conversations` of rows, or of a file."""

    def chats(rows=ROWS, tokenizer=None, **settings):
        file = rows if isinstance(rows, str) else jsonl(tmp_path / "chats.jsonl", rows)
        settings = {"chat_template": "chatml", "cache_dir": str(tmp_path / "cache"), **settings}
        return prepared(Conversations(file, **settings), tokenizer or byte_pairs())

    return chats


def samples(split):
    return [split[index] for index in range(len(split))]


def learned(tokenizer, sample):
    """The texts, each between tokens that are not learned."""
    marks = "".join("x" if label >= 0 else " " for label in sample["labels"])
    runs, at = [], 0
    for run in marks.split(" "):
        runs += [tokenizer.decode(sample["labels"][at : at + len(run)])] if run else []
        at += len(run) + 1
    return runs


WANTED = [
    ["the answer is forty two.<|im_end|>"],
    ["hello world<|im_end|>", "a book<|im_end|>"],
    ["\n\nhello world\n<|im_end|>"],
]


@pytest.mark.first(2)
@pytest.mark.parametrize("make", [byte_pairs, byte_tokenizer])
@pytest.mark.parametrize("template", ["chatml", PLAIN])
def test_the_assistants_words_and_the_end_of_its_turn_are_learned_and_nothing_else(chats, make, template):
    tokenizer = make()
    found = samples(chats(tokenizer=tokenizer, chat_template=template).train)
    assert [learned(tokenizer, sample) for sample in found] == WANTED
    for sample, row in zip(found, ROWS, strict=True):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        assert tokenizer.decode(sample["input_ids"]) == text
        assert all(label in (-100, one) for label, one in zip(sample["labels"], sample["input_ids"], strict=True))
    assert tokenizer.eos_token == "<|im_end|>"  # where the saved model is to stop


def test_tokens_and_mask_are_those_of_transformers_where_these_are_right(chats):
    tokenizer = byte_pairs()
    found = samples(chats(ROWS[:2], tokenizer).train)
    for sample, row in zip(found, ROWS, strict=False):
        options = {"return_assistant_tokens_mask": True, "return_dict": True, "tokenize": True}
        theirs = tokenizer.apply_chat_template(row["messages"], **options)
        assert sample["input_ids"] == theirs["input_ids"]
        assert [int(label >= 0) for label in sample["labels"]] == theirs["assistant_masks"]


def test_a_prompt_has_the_tokens_that_a_model_sees_which_is_to_answer_it(chats):
    """Of a line break of the template and those of the answer byte pairs would make one token."""
    tokenizer = byte_pairs()
    data = chats([ROWS[2]], tokenizer)
    prompt = tokenizer.apply_chat_template(ROWS[2]["messages"][:1], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(ROWS[2]["messages"])["input_ids"]
    sample = data.train[0]
    assert whole[: len(prompt)] != prompt  # else this would test nothing
    assert sample["input_ids"][: len(prompt)] == prompt
    assert sample["labels"][: len(prompt) + 1] == [-100] * len(prompt) + [sample["input_ids"][len(prompt)]]
    batch = data.encode([CHATS[2][0][1], "good"], tokenizer)
    assert batch["input_ids"][0, : len(prompt)].tolist() == prompt
    assert batch["attention_mask"].sum(1).tolist()[0] == len(prompt)


def test_a_tokenizer_that_puts_a_blank_before_every_text_keeps_the_words_of_the_whole(chats):
    tokenizer = sentence_pieces()
    template = "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ ' ' + m.content }} [/INST]{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"  # noqa: E501 - Llama 2's
    rows = [{"prompt": "hello", "completion": "the answer"}]
    (sample,) = samples(chats(rows, tokenizer, chat_template=template).train)
    whole = tokenizer("[INST] hello [/INST] the answer<|end|>", add_special_tokens=False)["input_ids"]
    assert sample["input_ids"] == whole
    words = tokenizer.convert_ids_to_tokens([one for one in sample["labels"] if one >= 0])
    assert words == ["▁the", "▁answer", "<|end|>"]
    assert sample["labels"][-3:] == whole[-3:]


def test_a_template_that_rewrites_what_it_wrote_is_refused_unless_all_is_learned(chats, tmp_path):
    thinks = "{% for m in messages %}{{ m.role + ':' + m.content }}{% if loop.last and m.role == 'assistant' %} (last)"
    thinks += "{% endif %}<|im_end|>{% endfor %}"
    said = r"1 conversation cannot .*row 2 .* up to message 3 than as a whole.*data\.loss_on all"
    with pytest.raises(RecipeError, match=said):
        chats(ROWS[:2], chat_template=thinks)
    found = samples(chats(ROWS[:2], chat_template=thinks, loss_on="all").train)
    assert len(found) == 2
    assert all(sample["labels"] == sample["input_ids"] for sample in found)


def test_a_template_that_ends_no_turn_is_told_of_before_training(chats, capfd):
    endless = "{% for m in messages %}{{ '\n' + m.role + ': ' + m.content }}{% endfor %}"
    tokenizer = byte_pairs()
    chats(tokenizer=tokenizer, chat_template=endless)
    said = "does not learn to stop: give a data.chat_template that ends its text with {{ eos_token }}"
    assert said in capfd.readouterr().err
    assert tokenizer.eos_token == "<|end|>"
    words = Tokenizer(models.WordLevel({"a": 0, "<|end|>": 1}, unk_token="a"))
    without_turns = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>")
    said = r"data\.chat_template=chatml needs the token <\|im_end\|>, which model\.tokenizer lacks"
    with pytest.raises(RecipeError, match=said):
        chats(tokenizer=without_turns)


def test_the_beginning_of_text_stands_once(chats, tmp_path):
    tokenizer = byte_pairs(begins=True)
    template = "{{ bos_token }}" + CHATML
    (sample,) = samples(chats(ROWS[:1], tokenizer, chat_template=template).train)
    assert (sample["input_ids"].count(tokenizer.bos_token_id), sample["input_ids"][0]) == (1, tokenizer.bos_token_id)
    (tmp_path / "a.txt").write_text("hello world")
    data = prepared(Documents(str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache")), tokenizer)
    assert data.train[0]["input_ids"] == [*tokenizer("hello world")["input_ids"], tokenizer.eos_token_id]
    assert data.train[0]["input_ids"].count(tokenizer.bos_token_id) == 1


@pytest.mark.slow
def test_rows_of_every_form_and_file_make_the_same_samples(chats, tmp_path):
    tokenizer, chat = byte_pairs(), messages(CHATS[0])
    expected = samples(chats(ROWS[:1], tokenizer).train)
    turned = [{"from": {"user": "human", "assistant": "gpt"}[one["role"]], "value": one["content"]} for one in chat]
    prompt, answer = chat[0]["content"], chat[1]["content"]
    forms = {
        "messages": {"turns": chat, "id": 3},
        "sharegpt": {"conversations": turned},
        "prompt": {"completion": answer, "prompt": prompt},
        "both": {"prompt": chat[:1], "completion": chat[1:]},
        "alpaca": {"instruction": prompt, "input": "", "output": answer},
    }
    for name, row in forms.items():
        asked = {"messages_column": "turns"} if name == "messages" else {}
        for kind in ("jsonl", "parquet", "csv"):
            path = tmp_path / f"{name}.{kind}"
            if kind == "jsonl":
                jsonl(path, [row])
            elif kind == "parquet":
                pq.write_table(pa.Table.from_pylist([row]), path)
            elif name == "both":
                continue
            else:
                texts = {key: one if isinstance(one, str) else json.dumps(one) for key, one in row.items()}
                pandas.DataFrame([texts]).to_csv(path, index=False)
            assert samples(chats(str(path), tokenizer, **asked).train) == expected, path
    said = (
        {"prompt": f"{prompt}\n\nmore", "completion": answer},
        {"instruction": prompt, "input": "more", "output": answer},
    )
    assert samples(chats(said[:1], tokenizer).train) == samples(chats(said[1:], tokenizer).train)
    hub = tmp_path / "hub"
    hub.mkdir()
    for split in ("train", "validation"):
        datasets.Dataset.from_list(ROWS[:1]).to_parquet(hub / f"{split}.parquet")
    named = {"chat_template": "chatml", "cache_dir": str(tmp_path / "cache"), "val_split": "validation"}
    data = prepared(Conversations(name=str(hub), **named), tokenizer)
    assert samples(data.train) == samples(data.val) == expected
    assert data.train.describe(0) == f"{hub} train row 0 (the first is row 0, as on the hub)"
    assert data.train[0]["labels"] == expected[0]["labels"]


BAD = [
    (
        {"messages": messages([("user", "hello"), ("asistant", "a")])},
        "'asistant' in message 2 .*did you mean assistant",
    ),
    ({"messages": "good"}, "a text that is not JSON"),
    ({"text": "good"}, "has no messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "has 3 instead of a text in message 1 of messages"),
    ({"messages": ["good"]}, "has 'good' for message 1"),
    ({"messages": messages([("user", "hello")])}, "has no text of the assistant"),
    (
        {"messages": messages([("user", "hi " * 99), ("assistant", "a")])},
        "no text of the assistant within data.max_length",
    ),
    ({"messages": messages([("user", "\ud800"), ("assistant", "good")])}, "is not UTF-8 text"),
]


def test_rows_that_nothing_can_be_learned_from_are_counted_named_and_limited(chats, tmp_path, capfd):
    rows = [ROWS[0], *(row for row, _ in BAD), ROWS[1]]
    data = chats(rows, max_length=40, max_bad_samples=len(BAD))
    said = capfd.readouterr()
    assert len(data.train) == 2
    names = [data.train.describe(index).split(" (")[0] for index in (0, 1)]
    assert names == [f"{tmp_path}/chats.jsonl row {n}" for n in (1, 10)]
    assert f"warning: {len(BAD)} conversations cannot be learned from and are skipped: " in said.err
    assert "and 3 more" in said.err
    for limit, (_, why) in enumerate(BAD):
        with pytest.raises(RecipeError, match=f"1 conversation .*data.max_bad_samples=0: .*row 2 .*{why}"):
            chats([ROWS[0], BAD[limit][0]], max_length=40)
    said = f"8 conversations cannot be learned from, more than data.max_bad_samples={limit}"
    with pytest.raises(RecipeError, match=said):
        chats(rows, max_length=40, max_bad_samples=limit)


TOOLED = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML.replace(
    "message['content'] +", "(message.tool_calls | tojson if message.tool_calls else message['content']) +"
)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "stream"])
def test_tools_go_to_the_template_and_nothing_that_only_other_rows_have(chats, kind, tmp_path, capfd):
    """Arrow gives every struct of a column the keys of all, and older versions sort them: here both orders agree."""
    tokenizer, rows = byte_tokenizer(), []
    for name in "xy":
        call = {"role": "assistant", "tool_calls": [{"arguments": {name: 1}, "name": name}]}
        chat = [{"role": "user", "content": "hello"}, call, {"role": "tool", "content": "1"}]
        rows.append({"messages": [*chat, {"role": "assistant", "content": "good"}], "tools": [{"name": name, name: 0}]})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    rows[1]["tools"] = json.dumps(rows[1]["tools"])
    source = rows if kind == "jsonl" else str(tmp_path / "rows.parquet")
    settings = {"tokenizer": tokenizer, "max_length": 300, "streamed": kind == "stream"}
    split = chats(source, chat_template=TOOLED, **settings).train
    for name, sample in zip("xy", samples(split), strict=True):
        said = json.dumps([{"arguments": {name: 1}, "name": name}]) + "<|im_end|>"
        assert learned(tokenizer, sample) == [said, "good<|im_end|>"]
        tools = json.dumps([{"name": name, name: 0}])
        assert tokenizer.decode(sample["input_ids"]).startswith(f"{tools}\n<|im_start|>")
    assert "has a column tools" not in capfd.readouterr().err
    with pytest.raises(RecipeError, match=r"row 1 .* has a text that is not JSON \('x'\) instead of a list of tools"):
        chats([{**rows[0], "tools": "x"}], chat_template=TOOLED)
    chats([*ROWS[:1], {**ROWS[1], "tools": [{}]}])
    assert capfd.readouterr().err.count("has a column tools, which the chat template ignores") == 1


def test_what_is_cut_is_counted_and_what_is_learned_is_said(chats, capfd):
    tokenizer = byte_tokenizer()
    rows = [{"prompt": "hello", "completion": "a" * 200}, ROWS[0]]
    rows[1] = {"prompt": "hello", "completion": "good"}
    data = chats(rows, tokenizer, max_length=64)
    length, answered = len(data.train[1]["input_ids"]), 5
    assert data.train.lengths.tolist() == [64, length]
    prompt = length - answered - 1  # with the line break behind the turn
    cut = prompt + 200 + 2 - 64
    said = capfd.readouterr()
    assert f"data: train: 2 conversations, {64 + length} tokens ({64 - prompt + answered} predicted)" in said.out
    assert f"warning: train: 1 of 2 conversations are truncated, by {cut} tokens: raise data.max_length=64" in said.err
    batch = data.train.__getitems__([1, 0])
    assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(batch, (2, 64))
    assert batch["labels"][0, length:].eq(-100).all()
    assert batch["attention_mask"].sum(1).tolist() == [length, 64]
    assert int((batch["labels"][:, 1:] != -100).sum()) == 64 - prompt + answered
    assert all(value.dtype == torch.int64 for value in batch.values())


@pytest.fixture
def library(tmp_path):
    """A folder of documents of many lengths, some empty, one of them no text."""
    folder = tmp_path / "library"
    (folder / "sub").mkdir(parents=True)
    for number in range(30):
        text = "".join(chr(97 + (number * 7 + k * k) % 26) for k in range(number * 3))
        (folder / ("sub" if number % 2 else "") / f"{number:02d}.{('txt', 'py', 'md')[number % 3]}").write_text(text)
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def documents(place, tokenizer=None, **settings):
    cache = {"cache_dir": str(place.parent / "cache"), "max_length": 8}
    return prepared(Documents(str(place), **cache | settings), tokenizer or byte_tokenizer())


def test_every_token_of_a_document_but_the_first_is_predicted_once(library, capfd):
    tokenizer = byte_tokenizer()
    data = documents(library, tokenizer)
    pieces = {}
    for index, sample in enumerate(samples(data.train)):
        pieces.setdefault(data.train.describe(index), []).append(sample["input_ids"])
        assert sample["labels"] == sample["input_ids"]
        assert 2 <= len(sample["input_ids"]) == data.train.lengths[index] <= 8
    assert len(pieces) == 29
    for path, parts in pieces.items():
        text = Path(path).read_text(encoding="utf-8")
        assert [*parts[0], *(one for part in parts[1:] for one in part[1:])] == [*text.encode(), tokenizer.eos_token_id]
        assert all(before[-1] == after[0] for before, after in zip(parts, parts[1:], strict=False))
    predicted = sum(len(part) - 1 for parts in pieces.values() for part in parts)
    assert predicted == sum(number * 3 for number in range(1, 30))
    said = capfd.readouterr()
    count = sum(map(len, pieces.values()))
    assert f"train: 29 documents, {predicted + 29:,} tokens ({predicted:,} predicted), in {count} pieces" in said.out
    assert f"1 of {count + 1} documents are empty and skipped ({library}/00.txt)" in said.err
    assert f"{library}: skipping files of other types: .png (1)" in said.err


def test_whole_documents_are_held_out(library):
    data = documents(library, val_fraction=0.25)
    both = [{split.describe(index) for index in range(len(split))} for split in (data.train, data.val)]
    assert not both[0] & both[1]
    assert list(map(len, both)) == [21, 8]
    folds = [documents(library, val_fraction=1 / 3, val_fold=fold).val for fold in range(3)]
    named = [{fold.describe(index) for index in range(len(fold))} for fold in folds]
    assert sum(map(len, named)) == len(set.union(*named)) == 29


def test_files_that_are_no_text_are_named(library, tmp_path):
    (library / "bad.txt").write_bytes(b"caf\xe9")
    (library / "zero.txt").write_bytes(b"a\0b")
    said = r"2 documents .*bad\.txt is not utf-8 text.*zero\.txt is not text \(it contains the character 0\)"
    with pytest.raises(RecipeError, match=said):
        documents(library)
    data = documents(library / "bad.txt", encoding="latin-1")
    assert bytes(data.train[0]["input_ids"][:-1]).decode() == "café"
    assert len(documents(library, max_bad_samples=2).train) == len(documents(library / "**" / "??.*").train)
    with pytest.raises(RecipeError, match=r"data\.train_files='.*00\.txt': every document is empty"):
        documents(library / "00.txt")


def test_a_document_of_which_the_tokenizer_leaves_nothing_is_empty(tmp_path, capfd):
    tokenizer = byte_pairs()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    (tmp_path / "a.txt").write_text("\u200b")
    (tmp_path / "b.txt").write_text("hello\u200b")
    assert len(documents(tmp_path, tokenizer).train) == 1
    assert f"1 of 2 documents are empty and skipped ({tmp_path}/a.txt)" in capfd.readouterr().err


def test_documents_of_rows_are_those_of_files(library, tmp_path):
    texts = [path.read_text() for path in sorted(library.rglob("*.*")) if path.suffix != ".png"]
    whole = samples(documents(library).train)
    tables = tmp_path / "tables"
    tables.mkdir()
    jsonl(tables / "a.jsonl", [{"text": text} for text in texts[:9]])
    pandas.DataFrame({"text": texts[9:20]}).to_csv(tables / "b.csv", index=False)
    pq.write_table(pa.table({"text": texts[20:]}), tables / "c.parquet")
    data = documents(tables)
    assert sorted(map(str, samples(data.train))) == sorted(map(str, whole))
    assert data.train.describe(len(data.train) - 1).startswith(f"{tables}/c.parquet row {len(texts) - 20} ")


def test_a_stream_has_the_samples_of_the_file(chats, tmp_path):
    rows = [{"messages": messages([("user", f"hello {n}"), ("assistant", "good " * n)])} for n in range(1, 30)]
    shards = tmp_path / "shards"
    shards.mkdir()
    for part in range(2):
        pq.write_table(pa.Table.from_pylist(rows[part::2]), shards / f"{part}.parquet", row_group_size=4)
    plain, stream = (chats(str(shards), streamed=streamed, max_length=64) for streamed in (False, True))
    assert samples(stream.train) == samples(plain.train)
    assert stream.train.describe(15) == plain.train.describe(15)
    assert (stream.train.groups.sizes, stream.train.longest) == ((4, 4, 4, 3, 4, 4, 4, 2), [3, 2, 1, 0])
    assert pickle.loads(pickle.dumps(stream.train))[5] == stream.train[5]
    requests = [Request([3, 20, 9]), Request([28])]
    for workers in (0, 1):
        found = Loader(stream.train, stream.collate, workers=workers)(requests)
        for batch, request in zip(found, requests, strict=True):
            wanted = plain.train.__getitems__(request.indices)
            assert all(torch.equal(batch[key], wanted[key]) for key in wanted)
    prints = {fingerprint(data) for data in (stream, chats(str(shards), streamed=True, max_length=64, loss_on="all"))}
    assert len(prints) == 2


def test_rows_of_a_stream_that_nothing_can_be_learned_from_are_left_out_by_name(chats, tmp_path):
    rows = [*ROWS, {"messages": messages([("user", "hello")])}, {"messages": messages([("user", "a"), ("usr", "b")])}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    data = chats(str(tmp_path / "rows.parquet"), streamed=True)
    (found,) = Loader(data.train, data.collate, max_bad_samples=3)([Request([0, 3, 2, 4])])
    assert isinstance(found, PartialBatch)
    assert (found.kept_indices, [bad.position for bad in found.bad]) == ([0, 2], [3, 4])
    reasons = [bad.reason for bad in found.bad]
    assert "row 4 (the first is row 1) has no text of the assistant" in reasons[0]
    assert "row 5 (the first is row 1) has the role 'usr' in message 2" in reasons[1]
    today = "{{ strftime_now('%d %b') }}" + CHATML
    with pytest.raises(RecipeError, match=r"today's date \(strftime_now\), but a stream is tokenised again"):
        chats(str(tmp_path / "rows.parquet"), streamed=True, chat_template=today)


ROUNDS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
CALLED = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
TIME, SPACE = r"takes more than 0\.3 s of CPU time", r"takes more than 0\.2 GB of memory"


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ROUNDS, TIME),
        (CALLED, TIME),
        ("{{ 10 ** 1000000000 }}", TIME),  # computed when the template is compiled, in one operation
        ("{{ 'x' * 3000000000 }}", SPACE),
        ("{{ 'x' | center(3000000000) }}", SPACE),
        (DOUBLED, SPACE),
        ("{% if messages|length > 3 %}" + ROUNDS + "{% endif %}" + CHATML, TIME + ".* begins with 'good'"),
        ("{{ 'x' * 1000001 }}", "has 1,000,001 characters, and the max is 1,000,000"),
    ],
)
def test_a_chat_template_has_a_bound_on_time_and_memory(chats, tmp_path, monkeypatch, template, said):
    # A busy machine may take longer than 0.3 s of CPU time to fill the memory.
    monkeypatch.setattr("trainer.data.language_samples.SECONDS", 30.0 if said == SPACE else 0.3)
    monkeypatch.setattr("trainer.data.language_samples.MEMORY", 200_000_000)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(RecipeError, match=said) as refusal:
        chats(chat_template=str(tmp_path / "chat_template.jinja"), max_length=64)
    assert "chat_template.jinja" in str(refusal.value) or "row 1 " in str(refusal.value)
    tokenizer = byte_pairs()
    tokenizer.chat_template = template
    with pytest.raises(RecipeError, match=said.removesuffix(".* begins with 'good'")):
        Conversations("none", max_length=64).encode(["hi", messages(CHATS[1])], tokenizer)


def test_a_chat_template_of_a_file_writes_what_the_known_one_writes_in_every_process(chats, tmp_path):
    (tmp_path / "shards").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "shards" / "a.parquet")
    settings = {"rows": str(tmp_path / "shards"), "streamed": True, "max_length": 64}
    known, plain = (chats(chat_template=template, **settings) for template in ("chatml", PLAIN))
    for workers in (0, 1):
        loaders = [Loader(data.train, data.collate, workers=workers) for data in (plain, known)]
        found, wanted = (list(loader([Request([0, 2]), Request([1])])) for loader in loaders)
        for one, other in zip(found, wanted, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in other)


def test_a_conversation_of_too_many_messages_or_characters_is_not_rendered(chats, monkeypatch):
    module = "trainer.data.language_samples"
    monkeypatch.setattr(f"{module}.render_jinja_template", lambda **options: pytest.fail("rendered"))
    monkeypatch.setattr(f"{module}.ChatReader._probe_turn_end", lambda *args: None)
    many = [("user", "a"), ("assistant", "b")] * 2_501
    with pytest.raises(RecipeError, match=r"chats\.jsonl row 1 .*has 5,002 messages, and the max is 5,000: split it"):
        chats([{"messages": messages(many)}])
    with pytest.raises(RecipeError, match=r"has 1,000,001 characters, and the max is 1,000,000: cut it"):
        chats([{"messages": messages([("user", "a" * 1_000_000), ("assistant", "b")])}], max_length=64)


def test_settings_that_will_not_do_are_refused_by_name(tmp_path, tokenizer, chats):
    file = jsonl(tmp_path / "a.jsonl", ROWS)

    def no(message, kind=Conversations, words=None, **settings):
        common = {"train_files": file, "cache_dir": str(tmp_path / "c"), "max_length": 99}
        refused(message, kind(**common | settings), words or byte_pairs())

    no(r"has no chat template: set data\.chat_template to a \.jinja file, its text, or chatml")
    no(r"data\.chat_template='none\.jinja' is neither Jinja text nor a readable file", chat_template="none.jinja")
    no(r"data\.chat_template: line 1 of the template is not valid Jinja", chat_template="{% for %}")
    words = byte_pairs()
    words.chat_template = {"default": 5}
    no(r"the chat template of model\.tokenizer is 5, not a text: fix it", words=words)
    no(r"data\.messages_column='message': .*did you mean 'messages'", messages_column="message", chat_template="chatml")
    texts = jsonl(tmp_path / "b.jsonl", [{"text": ""}])
    said = r"has no column messages or conversations, nor data\.prompt_column='prompt' .*it has 'text'"
    no(said, train_files=texts, chat_template="chatml")
    no(r"has no end of text \(eos_token\), which must follow", Documents, words=tokenizer, train_files=texts)
    no(r"data\.text_column='text': .*a\.jsonl has no such column; it has 'messages'", Documents)
    no(r"data\.train_files is missing", train_files=None)
    no(r"data\.train_files=.*: use it at most 8 times", train_files="**/" * 1000 + "a.txt")
    no(r"data\.train_files='.*nothing': there is no such folder or file", train_files=str(tmp_path / "nothing"))
    no(r"is not a \.parquet file", streamed=True, chat_template="chatml")
    for message, settings in (
        (r"data\.train_files='a' and data\.name='b' exclude each other", {"train_files": "a", "name": "b"}),
        (r"data\.val_split='v' needs data\.name, which is not set", {"val_split": "v"}),
        (r"data\.val_files='v' needs data\.train_files", {"name": "a", "val_files": "v"}),
        (r"data\.val_files='v' and data\.val_fraction=0\.1 exclude", {"val_files": "v", "val_fraction": 0.1}),
        (r"data\.val_fraction=0\.1 is not supported with data\.streamed", {"streamed": True, "val_fraction": 0.1}),
        (r"data\.max_length=1 leaves nothing to predict", {"max_length": 1}),
        (r"data\.loss_on='user' is not one of assistant, all", {"loss_on": "user"}),
        (r"data\.encoding='utf9' is not an encoding", {"encoding": "utf9"}),
    ):
        with pytest.raises(RecipeError, match=message):
            Conversations(**settings)


def test_a_mixture_draws_of_conversations_and_documents(chats, library, tmp_path):
    common = {"max_length": 64, "cache_dir": str(tmp_path / "c")}
    chat = Conversations(jsonl(tmp_path / "a.jsonl", ROWS), chat_template="chatml", **common)
    data = Mixture([(chat, 0.5), ["Documents", {"train_files": str(library), **common}, 0.5]])
    assert data.tasks == ["language"]
    prepared(data, byte_tokenizer())
    assert len(data.train) == 3 + len(data.datasets[1].train)
    chances = np.asarray(data.sample_weights())
    assert chances[:3].sum() == pytest.approx(chances[3:].sum())
    batch = data.collate([data.train[0], data.train[5]])
    assert batch["labels"].shape == batch["input_ids"].shape
    assert data.train.lengths[5] == len(data.train[5]["input_ids"])


def test_data_of_the_hub_that_is_not_here_has_an_outline():
    data = Conversations(name="nobody/has-this", max_length=32, val_fraction=0.1, test_split="test")
    outline = data.spec()
    assert (outline.train, outline.val, outline.test, outline.length) == (9_000, 1_000, 10_000, 32)
    assert set(outline.tensors) == {"input_ids", "attention_mask", "labels"}
    assert Documents("docs").spec() is None


def test_the_tokens_of_bytes_are_saved_and_loaded_as_any(tmp_path):
    tokenizer, text = byte_tokenizer(), "é <|im_end|>\n\n  \U0001f600 x"
    ids = tokenizer(text)["input_ids"]
    assert ids == [*"é ".encode(), 259, *"\n\n  \U0001f600 x".encode()]
    assert (tokenizer.decode(ids), len(tokenizer)) == (text, 260)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert (again(text)["input_ids"], again.eos_token_id) == (ids, 256)
    assert again.all_special_ids == tokenizer.all_special_ids


def test_documents_know_the_bytes_of_each_token_that_is_predicted_and_conversations_do_not(tmp_path, chats):
    texts = ["hello world " * 9, "a film: caf\u00e9 \u4f60\u597d", "good"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    for tokenizer in (byte_pairs(), byte_tokenizer()):
        files = {"train_files": str(tmp_path / "[01].txt"), "test_files": str(tmp_path / "2.txt")}
        data = prepared(Documents(**files, max_length=8, cache_dir=str(tmp_path / "cache")), tokenizer)
        for split, held in ((data.train, texts[:2]), (data.test, texts[2:])):
            predicted = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in held)
            assert split.bytes_per_token == sum(len(text.encode()) for text in held) / predicted
    assert len(data.train) > 5, "in pieces"
    assert chats().train.bytes_per_token is None


def test_an_evaluation_needs_the_test_files_alone(tmp_path):
    tokenizer = byte_pairs()
    test = jsonl(tmp_path / "test.jsonl", ROWS[:1])
    how = {"chat_template": "chatml", "cache_dir": str(tmp_path / "cache")}
    for data in (
        Conversations("gone.jsonl", test_files=test, val_fraction=0.1, **how).for_evaluation(),
        Conversations("gone.jsonl", **how).for_evaluation(path=test),
    ):
        assert samples(prepared(data, tokenizer).test) == samples(prepared(Conversations(test, **how), tokenizer).train)
    with pytest.raises(RecipeError, match="Conversations cannot evaluate the file"):
        Conversations(name="org/chats").for_evaluation(path=test)
