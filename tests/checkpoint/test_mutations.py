"""Whatever happens to the files of a checkpoint, it is found before anything of it is used."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, read_manifest, verify_files
from trainer.checkpoint.parts import on_host, share_out, whole
from trainer.checkpoint.writer import Snapshot, Writer
from trainer.run.resume import Found

RANKS = 2
MUTATIONS = 1000


def save(folder: CheckpointFolder, step: int, ranks: int = RANKS, figures: dict | None = None, **options) -> Path:
    """A checkpoint of a few tensors, written as a run of ``ranks`` ranks writes it; the first rank comes last."""
    tensors = {f"t{number}": whole(torch.full((5, number + 1), float(step + number))) for number in range(6)}

    def manifest(files):
        return Manifest(
            run="r", step=step, epoch=0, step_in_epoch=step, seed=0, world_size=ranks, plan="p", recipe={"seed": 0},
            dataset="d", tokenizer=None, versions={}, figures=figures, created="now", files=files,
        )  # fmt: skip

    for rank in reversed(range(ranks)):
        snapshot = Snapshot(
            step=step,
            parts=on_host(share_out(tensors, rank, ranks)),
            own={"random": {}, "values": {}},
            common={"counters": {"step": step}},
            history=b"step,loss\n1,0.5\n",
            manifest=manifest,
        )
        settings = {"keep_last": 9, "keep_best": 0, "score": lambda figures: -figures["loss"]} | options
        Writer(folder, rank, ranks, "attempt", 5.0, **settings).write(snapshot)
    return folder.path / f"step-{step:08d}"


def verify(path: Path) -> None:
    verify_files(path, read_manifest(path))


def complaint_about(path: Path) -> str | None:
    try:
        verify(path)
    except CorruptCheckpoint as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = CheckpointFolder(tmp_path_factory.mktemp("originals"))
    return [save(folder, step) for step in (10, 20)]


def mutate(path: Path, other: Path, draw: random.Random) -> str:
    """Do something to the checkpoint ``path`` that makes it another, and say what."""
    victim = path / draw.choice(sorted(os.listdir(path)))
    content = bytearray(victim.read_bytes())
    kind = draw.choice(
        ["bit", "byte", "cut", "append", "zeros", "delete", "swap", "foreign", "insert", "link", "extra"]
    )
    if kind == "bit":
        at = draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        at = draw.randrange(len(content))
        content[at] = (content[at] + draw.randrange(1, 256)) % 256
    elif kind == "cut":
        del content[draw.randrange(len(content)) :]
    elif kind == "append":
        content += draw.randbytes(draw.randrange(1, 9))
    elif kind == "insert":
        at = draw.randrange(len(content))
        content[at:at] = draw.choice([b" ", b"\n", b"0", b"\x00"])
    elif kind == "zeros":  # a block that the disk lost
        start = draw.randrange(len(content))
        length = min(512, len(content) - start)
        if not any(content[start : start + length]):
            return mutate(path, other, draw)
        content[start : start + length] = bytes(length)
    elif kind == "delete":
        victim.unlink()
        return f"{kind} {victim.name}"
    elif kind == "swap":  # with another file of the same checkpoint
        second = path / draw.choice([name for name in sorted(os.listdir(path)) if name != victim.name])
        content = bytearray(second.read_bytes())
        second.write_bytes(victim.read_bytes())
    elif kind == "foreign":  # the same file of another checkpoint
        content = bytearray((other / victim.name).read_bytes())
        if content == victim.read_bytes():
            return mutate(path, other, draw)
    elif kind == "link":
        victim.unlink()
        victim.symlink_to(other / victim.name)
        return f"{kind} {victim.name}"
    else:
        (path / draw.choice(["notes.txt", "model.pt", "rank-00002.safetensors", "manifest.json.bak"])).write_text("x")
        return kind
    victim.write_bytes(content)
    return f"{kind} {victim.name}"


def test_no_mutation_is_accepted(originals, tmp_path):
    draw = random.Random(0)
    accepted, kinds = [], set()
    for trial in range(MUTATIONS):
        copy = tmp_path / originals[0].name
        shutil.copytree(originals[0], copy)
        what = mutate(copy, originals[1], draw)
        kinds.add(what)
        complaint = complaint_about(copy)
        if complaint is None or str(copy) not in complaint:  # it names the file
            accepted.append((trial, what, complaint))
        shutil.rmtree(copy)
    assert accepted == []
    assert len(kinds) > 40


def test_untouched_checkpoints_are_valid(originals):
    for path in originals:
        verify(path)


def test_a_manifest_of_a_later_version_is_refused(originals, tmp_path):
    copy = shutil.copytree(originals[0], tmp_path / originals[0].name)
    content = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(CorruptCheckpoint, match="has format 99, of a later version; this one reads format 1"):
        read_manifest(copy)


def test_a_checkpoint_under_another_steps_name_is_refused(originals, tmp_path):
    copy = shutil.copytree(originals[0], tmp_path / "step-00000011")
    with pytest.raises(CorruptCheckpoint, match="is of step 10, not of step-00000011: files were swapped"):
        read_manifest(copy)


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', "{}", '{"digest": 1}', "[" * 100_000, "\ufeff{}"])
def test_a_manifest_that_is_none_is_refused(originals, tmp_path, text):
    copy = shutil.copytree(originals[0], tmp_path / originals[0].name)
    (copy / MANIFEST).write_text(text)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json is corrupt"):
        read_manifest(copy)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "10"}, {"step": 10.0}, {"files": []}, {"files": {"a": 3}}, {"world_size": "1"}, {"world_size": 0},
        {"files": {"../state.json": {"bytes": 1, "sha256": "x"}}}, {"recipe": [1]}, {"recipe": None}, {"dataset": 3},
        {"tokenizer": 3}, {"figures": [1]}, {"format": "x"}, {"format": 0}, {"figures": {"acc": "x"}},
        {"figures": {"acc": float("nan")}}, {"figures": {"acc": 10**400}}, {"step": True}, {"epoch": -1},
        {"epoch": 10**30}, {"versions": {"torch": 2}}, {"data_files": {"a": None}},
        {"files": {"a": {"bytes": -1, "sha256": "0" * 64}}}, {"files": {"a": {"bytes": 1, "sha256": "\x1b[2J"}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_with_a_right_hash_and_wrong_content_is_refused(originals, tmp_path, changes):
    copy = shutil.copytree(originals[0], tmp_path / originals[0].name)
    content = dataclasses.asdict(read_manifest(copy)) | changes
    (copy / MANIFEST).write_text(Manifest(**content).to_json())
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json is corrupt: it holds something else") as caught:
        read_manifest(copy)
    assert f": {next(iter(changes))}=" in str(caught.value)  # the field


@pytest.mark.parametrize("kind", ["a named pipe", "a device", "a directory", "larger than"])
def test_a_manifest_that_has_no_end_is_refused_at_once(originals, tmp_path, kind):
    copy = shutil.copytree(originals[0], tmp_path / originals[0].name)
    manifest = copy / MANIFEST
    manifest.unlink()
    if kind == "a named pipe":
        os.mkfifo(manifest)
    elif kind == "a device":
        manifest.symlink_to("/dev/zero")
    elif kind == "a directory":
        manifest.mkdir()
    else:
        with open(manifest, "wb") as file:
            file.truncate(1 << 40)  # a sparse file
    with pytest.raises(CorruptCheckpoint, match=rf"manifest\.json cannot be read: it is {kind}"):
        read_manifest(copy)


WRONG = [
    None,
    True,
    -1,
    0.5,
    10**14,
    10**30,
    "x",
    "../../secrets",
    [],
    [-1],
    [10**14],
    [10**14] * 2,
    ["x"],
    {},
    {"a": 1},
]


def places(content, path=()):
    """Every value of a JSON tree, by the way to it."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def forge(folder, name, path, value):
    """Put ``value`` in the place of another in a JSON file, and make size, hash and digest fit: anybody can."""
    content = json.loads((folder / name).read_text())
    *way, last = path
    inner = content
    for key in way:
        inner = inner[key]
    inner[last] = value
    (folder / name).write_text(json.dumps(content))
    stated = dataclasses.asdict(read_manifest_of(folder))
    written = (folder / name).read_bytes()
    stated["files"][name] = {"bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}
    (folder / MANIFEST).write_text(Manifest(**stated).to_json())


def read_manifest_of(folder):
    content = json.loads((folder / MANIFEST).read_text())
    del content["digest"]
    return Manifest(**content)


def tensors_of(folder):
    """All tensors of a checkpoint, read as an export reads them."""
    found = Found(folder, read_manifest(folder))
    verify_files(folder, found.manifest)
    reader, _ = found.open()
    return {name: reader.read(name) for name in reader.shapes}


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_is_forged_with_hashes_that_fit_is_named_or_changes_nothing(originals, tmp_path, rank):
    name = f"rank-{rank:05d}.json"
    original = tensors_of(originals[0])
    ways = list(places(json.loads((originals[0] / name).read_text())))
    refused = 0
    for way in ways:
        for value in WRONG:
            copy = shutil.copytree(originals[0], tmp_path / originals[0].name)
            forge(copy, name, way, value)
            try:
                found = tensors_of(copy)
            except CorruptCheckpoint as error:
                refused += 1
                assert str(copy) in str(error)  # noqa: PT017
            else:
                assert all(torch.equal(tensor, original[key]) for key, tensor in found.items()), (way, value)
            shutil.rmtree(copy)
    assert refused > len(ways) * len(WRONG) // 3


def test_a_shape_that_no_file_can_hold_takes_no_memory(originals, tmp_path):
    copy = shutil.copytree(originals[0], tmp_path / originals[0].name)
    name, key = next(
        (path.name, key) for path in sorted(copy.glob("rank-*.json")) for key in json.loads(path.read_text())["tensors"]
    )
    forge(copy, name, ("tensors", key, "shape"), [10**7, 10**7])
    with pytest.raises(CorruptCheckpoint, match=rf"{key} is incomplete: \d+ of 100000000000000 numbers"):
        tensors_of(copy)


def test_a_checkpoint_is_found_valid_from_within(originals, monkeypatch):
    monkeypatch.chdir(originals[0])
    verify(Path("."))


def test_the_newest_and_the_best_are_kept_by_their_manifests(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    losses = {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.2, 5: 0.7, 6: None}
    for step, loss in losses.items():
        path = save(folder, step, 1, None if loss is None else {"loss": loss}, keep_last=2, keep_best=2)
        os.utime(path, (0, 0))  # times are not asked
    assert [path.name[-1] for path in folder.newest_first()] == ["6", "5", "4", "2"]
    assert not list(folder.path.glob(".*"))


def test_one_that_cannot_be_removed_is_told_ends_nothing_and_goes_later(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    save(folder, 1, 1)

    def stale(path, *args, **kwargs):
        raise OSError(116, "Stale file handle", str(path))

    warned = []
    monkeypatch.setattr("trainer.system.files.shutil.rmtree", stale)
    second = save(folder, 2, 1, keep_last=1, warn=warned.append)
    monkeypatch.undo()
    verify(second)
    (line,) = warned
    assert "step-00000001 could not be removed: Stale file handle" in line
    third = save(folder, 3, 1, keep_last=1)
    assert [path.name for path in folder.path.iterdir()] == [third.name]


def test_a_checkpoint_that_was_moved_elsewhere_stays_there(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    moved = Path(shutil.move(save(folder, 1, 1), tmp_path / "step-00000001"))
    (folder.path / "step-00000001").symlink_to(moved)
    (folder.path / ".step-00000009.dead.part").symlink_to(moved)
    warned = []
    assert folder.clean() == []
    second = save(folder, 2, 1, keep_last=1, warn=warned.append)
    assert warned == []
    assert [path.name for path in folder.path.iterdir()] == [second.name]
    verify(moved)


def test_a_full_disk_leaves_the_older_checkpoint_and_says_what_is_missing(tmp_path, monkeypatch):
    from trainer.errors import RunError

    folder = CheckpointFolder(tmp_path / "checkpoints")
    first = save(folder, 1, 1)

    def full(*args):
        raise OSError(28, "No space left on device", "file")

    monkeypatch.setattr("trainer.checkpoint.parts.os.fsync", full)
    with pytest.raises(RunError, match=r"no space for the checkpoint of step 2: .* bytes are missing on"):
        save(folder, 2, 1)
    verify(first)
    assert [path.name for path in folder.path.iterdir()] == [first.name]


def test_a_failure_on_another_rank_is_told_to_the_first(tmp_path, monkeypatch):
    from trainer.errors import RunError

    folder = CheckpointFolder(tmp_path / "checkpoints")
    original = Writer._write_own

    def broken(self, staging, snapshot):
        if self.rank == 1:
            raise OSError(5, "Input/output error", str(staging))
        original(self, staging, snapshot)

    monkeypatch.setattr(Writer, "_write_own", broken)
    with pytest.raises(RunError, match="could not be written: Input/output error"):
        save(folder, 3)
    first = Writer(folder, 0, 2, "attempt", 5.0, 1, 0, lambda figures: 0.0)
    snapshot = Snapshot(step=3, parts={}, own={}, common={}, history=b"", manifest=lambda files: None)
    with pytest.raises(RunError, match="rank 1: the checkpoint of step 3 could not be written: Input/output error"):
        first.write(snapshot)
    assert list(folder.path.iterdir()) == []


def test_what_a_dead_run_left_is_cleared_away(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    path = save(folder, 4, 1)
    (folder.path / ".step-00000005.abcd.part").mkdir()
    os.rename(path, folder.path / f".{path.name}.0123.old")  # died between the two moves of a replacement
    folder.clean()
    verify(path)
    assert [found.name for found in folder.path.iterdir()] == [path.name]
