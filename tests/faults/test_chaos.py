"""``python -m benchmarks.chaos``: a few kills always, each fault by ``-m slow``, hundreds of them by one command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("forks, and reads /proc", allow_module_level=True)

from helpers.warm import python

from benchmarks.chaos.command import parser, scores
from benchmarks.chaos.compare import Samples
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.trial import Outcome

ROOT = Path(__file__).parents[2]


def chaos(folder, *flags):
    """Run the command in a process that has not trained; its exit code, what it printed, and its scores."""
    out = folder / "chaos.json"
    done = python("-m", "benchmarks.chaos", "--out", out, *flags, cwd=ROOT, timeout=1700)
    said = done.stdout + done.stderr
    assert out.exists(), said
    return done.returncode, said, json.loads(out.read_text())["faults"]


def assert_as_promised(found, said):
    for name, row in found.items():
        assert row["trials"] or row["skipped"], name
        assert row["ended_in_time"] == row["resumed_exactly"] == row["trials"], said
        assert row["named"] == row["to_name"], said
        assert (row["orphans"], row["deviations"]) == (0, []), said


@pytest.mark.slow
def test_two_kills_one_of_them_in_a_save(tmp_path):
    code, said, found = chaos(tmp_path, "--trials", "2", "--only", "kill,kill-in-save")
    assert {name: row["trials"] for name, row in found.items()} == {"kill": 1, "kill-in-save": 1}
    assert_as_promised(found, said)
    assert code == 0, said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_fault(tmp_path):
    code, said, found = chaos(tmp_path, "--trials", "6")
    assert found.keys() == FAULTS.keys()
    assert [found[name]["trials"] for name in ("kill", "kill-in-save", "stop")] == [3, 3, 3]
    assert_as_promised(found, said)
    assert code == 0, said


def starts(*windows_of_starts):
    """Runs of one rank that have taken these windows."""
    return [SimpleNamespace(windows=lambda rank, taken=taken: taken) for taken in windows_of_starts]


def test_samples_that_go_on_from_a_checkpoint_are_in_order():
    samples = Samples([["a", "b", "c", "d"]])
    for start in starts(["a", "b", "c"], [], ["b", "c", "d"]):
        samples.add(start)
    assert samples.finish() == []
    assert samples.redone == 2


@pytest.mark.parametrize(
    ("taken", "problem"),
    [
        ((["a", "b"], ["d"]), "left out"),
        ((["a", "c"], ["d"]), "other samples"),
        ((["a", "b", "x"], ["c", "d"]), "other samples"),
        ((["a", "b"], ["c"]), "not all samples"),
    ],
)
def test_samples_that_are_not_are_found(taken, problem):
    samples = Samples([["a", "b", "c", "d"]])
    for start in starts(*taken):
        samples.add(start)
    assert any(problem in text for text in samples.finish())


def test_scores_count_what_could_be_tried():
    found = scores(
        [
            Outcome(what="one", seconds=2.0, named=True, resumed_exactly=True, redone=3),
            Outcome(what="two", seconds=4.0, ended_in_time=False, deviations=["late"]),
            Outcome(skipped="no tmpfs"),
        ]
    )
    assert (found["trials"], found["ended_in_time"], found["to_name"], found["named"]) == (2, 1, 1, 1)
    assert (found["resumed_exactly"], found["most_steps_redone"]) == (1, 3)
    assert (found["seconds_median"], found["seconds_max"]) == (3.0, 4.0)
    assert (found["skipped"], found["deviations"]) == ("no tmpfs", ["two: late"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "kil"], "--only: kil: the faults are kill"),
        (["--trials", "0"], "--trials: '0' must be"),
        (["--batch_size", "3"], "unrecognized arguments: --batch_size 3"),
        (["vit_digits"], "unrecognized arguments: vit_digits"),
    ],
)
def test_wrong_flags_are_refused(flags, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(flags)
    assert said in capsys.readouterr().err
