"""Whatever happens to the files of a checkpoint, it is found before anything of it is used; and how the ranks meet
over them."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from helpers.payloads import fit_manifest, set_entry

from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.manifest import MANIFEST, CorruptCheckpointError, Manifest, read_manifest, verify_files
from trainer.checkpoint.tensor_parts import assign_to_rank, replicated_part, view_on_host
from trainer.checkpoint.writer import CheckpointWriter, Snapshot, done_marker
from trainer.errors import RunError
from trainer.run.resume import ValidCheckpoint

RANKS = 2
MUTATIONS = 400


def save(folder, step, ranks=range(RANKS - 1, -1, -1), world_size=RANKS, figures=None, **options) -> Path:
    """A checkpoint of a few tensors, written as ``ranks`` of a run write it; the first rank comes last."""
    tensors = {f"t{number}": replicated_part(torch.full((5, number + 1), float(step + number))) for number in range(6)}
    facts = {"run": "r", "step": step, "epoch": 0, "step_in_epoch": step, "seed": 0, "world_size": world_size}
    facts |= {"plan": "p", "recipe": {"seed": 0}, "dataset": "d", "tokenizer": None, "versions": {}, "created": "now"}
    for rank in ranks:
        snapshot = Snapshot(
            step=step,
            parts=view_on_host(assign_to_rank(tensors, rank, world_size)),
            rank_state={"random": {}, "values": {}},
            shared_state={"counters": {"step": step}},
            history=b"step,loss\n1,0.5\n",
            manifest=lambda files: Manifest(figures=figures, files=files, **facts),
        )
        settings = {"keep_last": 9, "keep_best": 0, "score": lambda figures: -figures["loss"]} | options
        CheckpointWriter(folder, rank, world_size, "attempt", 5.0, **settings).write(snapshot)
    return folder.path / f"step-{step:08d}"


def save_alone(folder, step, **options) -> Path:
    return save(folder, step, (0,), 1, **options)


def verify(path: Path) -> None:
    verify_files(path, read_manifest(path))


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = CheckpointFolder(tmp_path_factory.mktemp("originals"))
    return [save(folder, step) for step in (10, 20)]


@pytest.fixture
def copy(originals, tmp_path):
    return Path(shutil.copytree(originals[0], tmp_path / originals[0].name))


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


KINDS = ["bit", "byte", "cut", "append", "zeros", "delete", "swap", "foreign", "insert", "link", "extra"]


def mutate(path: Path, other: Path, draw: random.Random) -> str:
    """Do something to the checkpoint ``path`` that makes it another, and say what."""
    victim, kind = path / draw.choice(sorted(os.listdir(path))), draw.choice(KINDS)
    content = bytearray(victim.read_bytes())
    at = draw.randrange(len(content))
    if kind == "bit":
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        content[at] = (content[at] + draw.randrange(1, 256)) % 256
    elif kind == "cut":
        del content[at:]
    elif kind == "append":
        content += draw.randbytes(draw.randrange(1, 9))
    elif kind == "insert":
        content[at:at] = draw.choice([b" ", b"\n", b"0", b"\x00"])
    elif kind == "zeros":  # a block that the disk lost
        length = min(512, len(content) - at)
        if not any(content[at : at + length]):
            return mutate(path, other, draw)
        content[at : at + length] = bytes(length)
    elif kind == "swap":  # with another file of the same checkpoint
        second = path / draw.choice([name for name in sorted(os.listdir(path)) if name != victim.name])
        content = bytearray(second.read_bytes())
        second.write_bytes(victim.read_bytes())
    elif kind == "foreign":  # the same file of another checkpoint
        content = bytearray((other / victim.name).read_bytes())
        if content == victim.read_bytes():
            return mutate(path, other, draw)
    elif kind == "extra":
        (path / draw.choice(["notes.txt", "model.pt", "rank-00002.safetensors", "manifest.json.bak"])).write_text("x")
        return kind
    victim.unlink()
    if kind == "link":
        victim.symlink_to(other / victim.name)
    elif kind != "delete":
        victim.write_bytes(content)
    return f"{kind} {victim.name}"


@pytest.mark.slow
def test_no_mutation_is_accepted_and_the_file_is_named(originals, tmp_path):
    draw, accepted, kinds = random.Random(0), [], set()
    for trial in range(MUTATIONS):
        path = shutil.copytree(originals[0], tmp_path / originals[0].name)
        kinds.add(mutate(path, originals[1], draw))
        try:
            verify(path)
        except CorruptCheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            accepted.append(trial)
        shutil.rmtree(path)
    assert accepted == []
    assert len(kinds) > 40


def test_untouched_checkpoints_are_valid_also_from_within(originals, monkeypatch):
    for path in originals:
        verify(path)
    monkeypatch.chdir(originals[0])
    verify(Path("."))


def test_a_manifest_of_a_later_version_or_another_step_is_refused(originals, copy, tmp_path):
    content = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(CorruptCheckpointError, match="has format 99, but this version reads at most format 1"):
        read_manifest(copy)
    other = shutil.copytree(originals[0], tmp_path / "step-00000011")
    with pytest.raises(CorruptCheckpointError, match="of step 10 is in step-00000011: files were swapped"):
        read_manifest(other)


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', "{}", '{"digest": 1}', "[" * 100_000, "\ufeff{}"])
def test_a_manifest_that_is_none_is_refused(copy, text):
    (copy / MANIFEST).write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is corrupt"):
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
def test_a_manifest_with_a_right_hash_and_wrong_content_is_refused(copy, changes):
    content = dataclasses.asdict(read_manifest(copy)) | changes
    (copy / MANIFEST).write_text(Manifest(**content).to_json())
    said = r"manifest\.json is corrupt: its content was not written by a run"
    with pytest.raises(CorruptCheckpointError, match=said) as caught:
        read_manifest(copy)
    assert f": {next(iter(changes))}=" in str(caught.value)  # the field


WRONG = [None, True, -1, 0.5, 10**14, 10**30, "x", "../../secrets", [], [-1], [10**14], [10**14] * 2, ["x"], {}]
WRONG += [{"a": 1}]


def places(content, path=()):
    """Every value of a JSON tree, by the way to it."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def forge(folder, name, path, value):
    set_entry(folder / name, path, value)
    fit_manifest(folder, name)


def tensors_of(folder):
    """All tensors of a checkpoint, read as an export reads them."""
    found = ValidCheckpoint(folder, read_manifest(folder))
    verify_files(folder, found.manifest)
    reader, _ = found.open()
    return {name: reader.read(name) for name in reader.shapes}


@pytest.mark.slow
def test_what_is_forged_with_hashes_that_fit_is_named_or_changes_nothing(originals, copy):
    name, refused = done_marker(1), 0
    original, untouched = tensors_of(originals[0]), {path: (copy / path).read_bytes() for path in (name, MANIFEST)}
    ways = list(places(json.loads(untouched[name])))
    for way in ways:
        for value in WRONG:
            forge(copy, name, way, value)
            try:
                found = tensors_of(copy)
            except CorruptCheckpointError as error:
                refused += 1
                assert str(copy) in str(error)  # noqa: PT017
            else:
                assert all(torch.equal(tensor, original[key]) for key, tensor in found.items()), (way, value)
            for path, content in untouched.items():
                (copy / path).write_bytes(content)
    assert refused > len(ways) * len(WRONG) // 3


def test_a_shape_that_no_file_can_hold_takes_no_memory(copy):
    key = next(iter(json.loads((copy / done_marker(0)).read_text())["tensors"]))
    forge(copy, done_marker(0), ("tensors", key, "shape"), [10**7, 10**7])
    with pytest.raises(CorruptCheckpointError, match=rf"{key} is incomplete: \d+ of 100000000000000 numbers"):
        tensors_of(copy)


def names_in(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def test_the_newest_and_the_best_are_kept_by_their_manifests(folder):
    losses = {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.2, 5: 0.7, 6: None}
    for step, loss in losses.items():
        path = save_alone(folder, step, figures=None if loss is None else {"loss": loss}, keep_last=2, keep_best=2)
        os.utime(path, (0, 0))  # times are not asked
    assert [path.name[-1] for path in folder.newest_first()] == ["6", "5", "4", "2"]
    assert len(names_in(folder)) == 4


def raising(number):
    """A function that fails as the operating system does."""

    def fail(path, *args, **kwargs):
        raise OSError(number, os.strerror(number), str(path))

    return fail


def test_one_that_cannot_be_removed_is_told_ends_nothing_and_goes_later(folder, monkeypatch):
    save_alone(folder, 1)
    warned = []
    monkeypatch.setattr("trainer.system.files.shutil.rmtree", raising(116))
    second = save_alone(folder, 2, keep_last=1, warn=warned.append)
    monkeypatch.undo()
    verify(second)
    (line,) = warned
    assert "step-00000001 could not be removed: Stale file handle" in line
    third = save_alone(folder, 3, keep_last=1)
    assert names_in(folder) == [third.name]


def test_a_checkpoint_that_was_moved_elsewhere_stays_there(folder, tmp_path):
    moved = Path(shutil.move(save_alone(folder, 1), tmp_path / "step-00000001"))
    (folder.path / "step-00000001").symlink_to(moved)
    (folder.path / ".step-00000009.dead.part").symlink_to(moved)
    assert folder.clean() == []
    second = save_alone(folder, 2, keep_last=1, warn=pytest.fail)
    assert names_in(folder) == [second.name]
    verify(moved)


def test_a_full_disk_leaves_the_older_checkpoint_and_says_what_is_missing(folder, monkeypatch):
    first = save_alone(folder, 1)
    monkeypatch.setattr("trainer.checkpoint.tensor_parts.os.fsync", raising(28))
    with pytest.raises(RunError, match=r"no space for the checkpoint of step 2: it needs .* lacks [0-9,]+ bytes"):
        save_alone(folder, 2)
    verify(first)
    assert names_in(folder) == [first.name]


def test_a_failure_on_another_rank_is_told_to_the_first(folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("trainer.checkpoint.writer.write_parts", raising(5))
        with pytest.raises(RunError, match="could not be written: Input/output error"):
            save(folder, 3, ranks=(1,))
    with pytest.raises(RunError, match="rank 1: the checkpoint of step 3 could not be written: Input/output error"):
        save(folder, 3, ranks=(0,))
    assert names_in(folder) == []


def test_the_folder_may_get_its_name_as_soon_as_the_last_sign_is_there(folder, monkeypatch):
    named, replace = folder.path / "step-00000003", os.replace

    def replace_and_name(part, path):
        replace(part, path)
        if os.path.basename(path) == done_marker(1):  # the first rank was waiting for it
            os.rename(os.path.dirname(path), named)

    monkeypatch.setattr("trainer.system.files.os.replace", replace_and_name)
    save(folder, 3, ranks=(1,))
    assert sorted(path.name for path in named.iterdir()) == ["rank-00001.json", "rank-00001.safetensors"]


def test_what_a_dead_run_left_is_cleared_away(folder):
    path = save_alone(folder, 4)
    (folder.path / ".step-00000005.abcd.part").mkdir()
    os.rename(path, folder.path / f".{path.name}.0123.old")  # died between the two moves of a replacement
    folder.clean()
    verify(path)
    assert names_in(folder) == [path.name]
