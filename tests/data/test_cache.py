"""The cache of what is made of data: made once, whole or not at all, and made again when it is broken."""

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pyarrow as pa
import pytest

from trainer.data import TextFiles, tokens
from trainer.data.cache import MANIFEST, cached, checksum, content_of
from trainer.errors import RecipeError

FORK = multiprocessing.get_context("fork")


def build(folder: Path) -> None:
    """Takes a moment, and leaves a trace beside the cache."""
    with open(folder.parents[1] / "log", "a") as log:
        log.write(f"{os.getpid()}\n")
    (folder / "half").write_text("half")
    time.sleep(0.3)
    (folder / "content").write_text("built")


def builds(tmp_path):
    return len((tmp_path / "log").read_text().splitlines())


def use(root, gate):
    gate.wait()
    assert (cached(root, "key", "a thing", build) / "content").read_text() == "built"


def test_of_processes_that_start_together_one_builds_and_the_others_wait(tmp_path):
    gate = FORK.Barrier(5)
    processes = [FORK.Process(target=use, args=(tmp_path / "cache", gate)) for _ in range(5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 5
    assert builds(tmp_path) == 1
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["key", "key.lock"]


def test_what_a_killed_process_has_begun_is_cleared_away(tmp_path):
    gate = FORK.Barrier(1)
    process = FORK.Process(target=use, args=(tmp_path / "cache", gate))
    process.start()
    while not list((tmp_path / "cache").glob("key.partial-*/half")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "cache" / "key").exists()
    use(tmp_path / "cache", gate)
    assert builds(tmp_path) == 2
    assert not list((tmp_path / "cache").glob("*.partial-*"))


def test_a_build_that_fails_leaves_nothing_behind(tmp_path):
    def fail(folder):
        (folder / "half").write_text("half")
        raise RecipeError("row 3 has no text")

    with pytest.raises(RecipeError, match="row 3 has no text"):
        cached(tmp_path / "cache", "key", "a thing", fail)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["key.lock"]


def cut(place):
    os.truncate(place / "content", 3)


def flip(place):
    (place / "content").write_text("bailt")


def lose(place):
    (place / "content").unlink()


def scribble(place):
    (place / MANIFEST).write_text("[1]")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (cut, "content has 3 bytes instead of 5"),
        (flip, "content is not what was written"),
        (lose, "content is missing"),
        (scribble, f"{MANIFEST} cannot be read"),
    ],
)
def test_a_broken_one_is_named_and_made_again(tmp_path, capsys, damage, fault):
    place = cached(tmp_path / "cache", "key", "a thing", build)
    damage(place)
    assert (cached(tmp_path / "cache", "key", "a thing", build) / "content").read_text() == "built"
    assert f"{place} is broken ({fault}): it is made again" in capsys.readouterr().err
    assert builds(tmp_path) == 2
    cached(tmp_path / "cache", "key", "a thing", build)
    assert (builds(tmp_path), capsys.readouterr().err) == (2, "")


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RecipeError, match=r"the cache .*/file/cache cannot be used \(Not a directory\).*data\.cache_dir"
    ):
        cached(tmp_path / "file" / "cache", "key", "a thing", build)


@pytest.fixture
def settled(monkeypatch):
    """Files count as settled from the moment on that they are written."""
    monkeypatch.setattr("trainer.data.cache.SETTLED_NS", -(10**18))


def test_a_file_is_hashed_again_only_when_it_may_have_changed(tmp_path, settled, monkeypatch):
    path = tmp_path / "a.csv"
    asked = []

    def hashed(path):
        asked.append(path)
        return checksum(path)

    def content(text):
        path.write_text(text)
        return content_of(tmp_path / "cache", [path], hashed)

    first = content("one")
    assert content_of(tmp_path / "cache", [path], hashed) == first
    assert len(asked) == 1
    (note,) = (tmp_path / "cache" / "contents").iterdir()
    note.write_text(note.read_text().replace(first[0], "x"))  # one that was written to the half, say
    assert content_of(tmp_path / "cache", [path], hashed) == first
    assert len(asked) == 2
    monkeypatch.undo()
    second, third = content("two"), content("ten")  # of one size, written within a moment
    assert len({first[0], second[0], third[0]}) == 3


def exchange_in_place(path, content):
    """As ``rsync --inplace -t`` does; again, until the clock of the file system has moved on."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_text(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def exchange_for_another(path, content):
    """As ``cp -p``, ``rsync -t`` and ``tar -x`` do."""
    before, other = path.stat(), path.with_name("other")
    other.write_text(content)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("exchange", [exchange_in_place, exchange_for_another])
def test_another_file_of_the_same_size_and_time_is_noticed(reviews, tokenizer, settled, exchange):
    first = reviews(tokenizer).train
    before = reviews.path.stat()
    text = reviews.path.read_text()
    exchange(reviews.path, text.replace("film number 7 is good,1", "film number 7 was bad,1"))
    after = reviews.path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    again = reviews(tokenizer).train
    assert again[7]["input_ids"] != first[7]["input_ids"]
    assert again.fingerprint() != first.fingerprint()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"gone\.csv cannot be read \(No such file or directory\)"):
        content_of(tmp_path / "cache", [tmp_path / "gone.csv"], checksum)


def test_of_a_huge_file_spread_blocks_count_and_of_others_every_byte(tmp_path):
    path = tmp_path / "file"
    blocks = [bytes([number]) * (1 << 20) for number in range(5)]

    def hashed(changed, most_bytes):
        path.write_bytes(b"".join([*blocks[:changed], b"x" * (1 << 20), *blocks[changed + 1 :]]))
        return checksum(path, most_bytes)

    assert len({hashed(changed, 5 << 20) for changed in range(5)}) == 5
    assert len({hashed(changed, 3 << 20) for changed in range(5)}) == 4  # blocks 0, 2 and 4


@pytest.fixture
def reviews(tmp_path):
    """A file of reviews, and what reads it again, from the same cache."""
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\n" + "".join(f"film number {i} is good,{i % 2}\n" for i in range(300)))

    def prepared(tokenizer, path=path):
        data = TextFiles(str(path), cache_dir=str(tmp_path / "cache"))
        data.prepare(tokenizer)
        return data

    prepared.path = path
    return prepared


def test_tokens_with_a_flipped_bit_are_found_and_made_again(reviews, tokenizer, capsys, tmp_path):
    before = reviews(tokenizer).train.fingerprint()
    (file,) = (tmp_path / "cache").glob("trainer/*/tokens.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = reviews(tokenizer).train.fingerprint()
    assert "tokens.arrow is not what was written): it is made again" in capsys.readouterr().err
    assert again == before


def test_a_file_elsewhere_with_the_same_content_is_not_tokenised_again(reviews, tokenizer, tmp_path, monkeypatch):
    before = reviews(tokenizer)

    def refuse(*_):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(tokens, "encode", refuse)
    (tmp_path / "moved").mkdir()
    copy = shutil.copy(reviews.path, tmp_path / "moved" / "others.csv")
    again = reviews(tokenizer, copy)
    assert again.train.fingerprint() == before.train.fingerprint()
    assert again.train.describe(0).startswith(f"{copy} row 2 ")


def test_tokens_stay_on_disk(reviews, tokenizer, tmp_path):
    reviews(tokenizer)
    allocated = pa.total_allocated_bytes()
    data = reviews(tokenizer)
    assert data.train.table.data.nbytes > 300 * 7 * 4
    assert pa.total_allocated_bytes() - allocated < 1000
    assert [entry["filename"] for entry in data.train.table.cache_files] == [
        str(path) for path in (tmp_path / "cache").glob("trainer/*/tokens.arrow")
    ]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["trainer"]  # no second copy of the texts
