"""The cache of what is made of data: made once, whole or not at all, and made again when it is broken."""

import multiprocessing
import os
import shutil
import signal

import pyarrow as pa
import pytest
from helpers import wait_until
from helpers.prepared import prepared

from trainer.data import TextFiles, tokens
from trainer.data.cache import MANIFEST, checksum, checksums, get_or_build, inspect_cached
from trainer.errors import RecipeError

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def made(tmp_path):
    """How often it was built is ``len(made)``; each waits for its ``gate`` with half of it written."""

    class Made:
        gate = FORK.Event()

        def __len__(self):
            return len((tmp_path / "log").read_text().splitlines())

        def __call__(self, folder):
            with open(tmp_path / "log", "a") as log:
                log.write(f"{os.getpid()}\n")
            (folder / "half").write_text("half")
            self.gate.wait()
            (folder / "content").write_text("built")

        def use(self):
            place = get_or_build(tmp_path / "cache", "key", "a thing", self)
            assert (place / "content").read_text() == "built"
            return place

    return Made()


def begun(tmp_path):
    wait_until(lambda: list((tmp_path / "cache").glob(".key.*.part/half")))


def test_of_processes_that_start_together_one_builds_and_the_others_wait(made, tmp_path):
    processes = [FORK.Process(target=made.use) for _ in range(4)]
    for process in processes:
        process.start()
    begun(tmp_path)
    made.gate.set()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(made) == 1
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["key", "key.lock"]


def test_what_a_killed_process_has_begun_is_cleared_away(made, tmp_path):
    process = FORK.Process(target=made.use)
    process.start()
    begun(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "cache" / "key").exists()
    made.gate = FORK.Event()  # the killed one may have held the lock of the other
    made.gate.set()
    made.use()
    assert len(made) == 2
    assert not list((tmp_path / "cache").glob(".*"))


def test_a_build_that_fails_leaves_nothing_behind_and_a_cache_that_cannot_be_written_names_the_setting(tmp_path):
    def fail(folder):
        (folder / "half").write_text("half")
        raise RecipeError("row 3 has no text")

    with pytest.raises(RecipeError, match="row 3 has no text"):
        get_or_build(tmp_path / "cache", "key", "a thing", fail)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["key.lock"]
    (tmp_path / "file").write_text("")
    said = r"the cache .*/file/cache cannot be used \(Not a directory\).*data\.cache_dir"
    with pytest.raises(RecipeError, match=said):
        get_or_build(tmp_path / "file" / "cache", "key", "a thing", fail)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda place: os.truncate(place / "content", 3), "content has 3 bytes instead of 5"),
        (lambda place: (place / "content").write_text("bailt"), "content has changed since it was written"),
        (lambda place: (place / "content").unlink(), "content is missing"),
        (lambda place: (place / MANIFEST).write_text("[1]"), f"{MANIFEST} cannot be read"),
    ],
)
def test_a_broken_one_is_named_and_made_again(made, capsys, damage, fault):
    made.gate.set()
    place = made.use()
    damage(place)
    made.use()
    assert f"{place} is damaged ({fault}): rebuilding it" in capsys.readouterr().err
    made.use()
    assert (len(made), capsys.readouterr().err) == (2, "")


def test_a_file_is_hashed_again_only_when_it_may_have_changed(tmp_path, settled, monkeypatch):
    path = tmp_path / "a.csv"
    asked = []

    def hashed(paths):
        asked.append(paths)
        return checksums(paths)

    def content(text):
        path.write_text(text)
        return inspect_cached(tmp_path / "cache", [path], hashed)

    first = content("one")
    assert inspect_cached(tmp_path / "cache", [path], hashed) == first
    assert len(asked) == 1
    (note,) = (tmp_path / "cache" / "contents").iterdir()
    note.write_text(note.read_text().replace(first[0], "x"))  # one that was written to the half, say
    assert inspect_cached(tmp_path / "cache", [path], hashed) == first
    assert len(asked) == 2
    monkeypatch.undo()
    second, third = content("two"), content("ten")  # of one size, written within a moment
    assert len({first[0], second[0], third[0]}) == 3
    path.unlink()
    with pytest.raises(RecipeError, match=r"a\.csv cannot be read \(No such file or directory\)"):
        inspect_cached(tmp_path / "cache", [path], checksums)


def test_of_a_huge_file_spread_blocks_count_and_of_others_every_byte(tmp_path):
    path = tmp_path / "file"
    blocks = [bytes([number]) * (1 << 20) for number in range(5)]

    def hashed(changed, most_bytes):
        path.write_bytes(b"".join([*blocks[:changed], b"x" * (1 << 20), *blocks[changed + 1 :]]))
        return checksum(path, most_bytes)

    assert len({hashed(changed, 5 << 20) for changed in range(5)}) == 5
    assert len({hashed(changed, 3 << 20) for changed in range(5)}) == 4  # blocks 0, 2 and 4


@pytest.fixture
def reviews(tmp_path, tokenizer):
    """What reads a file of reviews, again from the same cache."""
    rows = "".join(f"film number {i} is good,{i % 2}\n" for i in range(300))
    (tmp_path / "reviews.csv").write_text("text,label\n" + rows)

    def read(path=tmp_path / "reviews.csv"):
        return prepared(TextFiles(str(path), cache_dir=str(tmp_path / "cache")), tokenizer).train

    return read


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
def test_another_file_of_the_same_size_and_time_is_noticed(reviews, tmp_path, settled, exchange):
    path, first = tmp_path / "reviews.csv", reviews()
    before = path.stat()
    exchange(path, path.read_text().replace("film number 7 is good,1", "film number 7 was bad,1"))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    again = reviews()
    assert again[7]["input_ids"] != first[7]["input_ids"]
    assert again.fingerprint() != first.fingerprint()


def test_tokens_are_made_once_stay_on_disk_and_are_made_again_when_a_bit_flips(
    reviews, tmp_path, capsys, monkeypatch, tokenizer
):
    before = reviews().fingerprint()
    monkeypatch.setattr(tokens, "encode", lambda *_: pytest.fail("tokenised again"))
    tokenizer("a call changes the tokenizer's own state", truncation=True, max_length=3)
    (tmp_path / "moved").mkdir()
    copy = shutil.copy(tmp_path / "reviews.csv", tmp_path / "moved" / "others.csv")
    allocated = pa.total_allocated_bytes()
    again = reviews(copy)
    assert again.table.data.nbytes > 300 * 7 * 4
    assert pa.total_allocated_bytes() - allocated < 1000
    assert again.fingerprint() == before
    assert again.describe(0).startswith(f"{copy} row 2 ")
    monkeypatch.undo()
    (file,) = (tmp_path / "cache").glob("trainer/*/tokens.arrow")
    assert [entry["filename"] for entry in again.table.cache_files] == [str(file)]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["trainer"]  # no second copy of the texts
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert reviews().fingerprint() == before
    assert "tokens.arrow has changed since it was written): rebuilding it" in capsys.readouterr().err
