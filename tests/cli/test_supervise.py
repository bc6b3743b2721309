"""``trainer run``: restarts, and when there are none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("reads /proc", allow_module_level=True)

from cli.supervised import SETTINGS, Supervised, fork_processes
from helpers.started import own_recipe

from trainer.supervise import attempt as memory
from trainer.supervise.attempt import Attempt, AttemptResult, attempts, known_cut, ran_out_of_memory
from trainer.supervise.supervisor import Decision, RestartPolicy, fit_command, run_command, split


@pytest.fixture
def supervise(tmp_path):
    """A function that starts a :class:`Supervised` run."""
    started = []

    def begin(*flags, own=()):
        started.append(Supervised(tmp_path, *flags, own=own))
        return started[-1]

    yield begin
    for run in started:
        run.end()


def test_restarts_are_counted_anew_when_there_is_a_newer_checkpoint_and_waits_double_up_to_a_minute():
    policy = RestartPolicy(max_restarts=2, max_crashes=5, first_wait=1.0)
    assert [policy.after_crash(step, "x").wait for step in (-1, -1, 10, 10)] == [1.0, 2.0, 1.0, 2.0]
    assert policy.after_crash(10, "x") == Decision(None, "all 2 restarts are used up")
    policy = RestartPolicy(max_restarts=9, max_crashes=100, first_wait=1.0)
    assert [policy.after_crash(-1, "x").wait for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert RestartPolicy(max_restarts=0, max_crashes=1, first_wait=0.0).after_crash(3, "x") == Decision(
        None, "no restart is allowed"
    )


def test_two_crashes_with_the_same_newest_checkpoint_are_enough():
    policy = RestartPolicy(max_restarts=9, max_crashes=2, first_wait=0.0)
    assert policy.after_crash(10, "x").wait is not None
    stop = policy.after_crash(7, "ZeroDivisionError")  # a checkpoint that was set aside is no progress
    assert stop.wait is None
    assert "2 crashes in a row without a checkpoint after step 10" in stop.why
    assert "ZeroDivisionError" in stop.why


def test_smaller_micro_batches_are_another_attempt_than_the_crashes_before():
    policy = RestartPolicy(max_restarts=3, max_crashes=2, first_wait=0.0)
    assert policy.after_crash(-1, "x").wait is not None
    assert "micro-batches of 4" in policy.after_out_of_memory(-1, 4).why
    assert policy.after_crash(-1, "x").wait is not None
    assert policy.after_out_of_memory(-1, 0).wait is None


def test_a_preemption_is_no_crash_and_is_counted():
    policy = RestartPolicy(max_restarts=2, max_crashes=1, first_wait=0.0)
    assert [policy.after_preemption(5).wait is None for _ in range(3)] == [False, False, True]


def test_own_flags_come_before_the_recipe():
    own, words = split(["--restarts", "5", "--grace=30", "--", "vit_digits", "--epochs", "3"])
    assert (own.restarts, own.grace, own.nproc, words) == (5, 30, None, ["vit_digits", "--epochs", "3"])
    assert split(["--nproc", "2", "vit_digits"])[1] == ["vit_digits"]


def test_the_fit_command_resumes_in_one_directory(tmp_path):
    words = fit_command(["vit_digits", "--epochs", "3", f"--run.dir={tmp_path}"], ranks=2).argv()
    assert words[:4] == ["fit", "vit_digits", "--epochs", "3"]
    given = dict(zip(words[4::2], words[5::2], strict=True))
    assert given == {"--run.devices": "2", "--run.dir": str(tmp_path), "--run.resume": "auto"}
    assert "runs/vit_digits/" in fit_command(["vit_digits"], ranks=None).run_dir


def test_smaller_micro_batches_keep_the_batch_and_what_may_change():
    command = fit_command(
        ["r", "--accumulate", "4", "--run.allow_change", "[optim.lr]"], None
    ).with_smaller_micro_batch(64, 8)
    words = command.argv()
    assert "--accumulate" not in words
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert (given["--batch_size"], given["--memory.micro_batch_size"]) == ("64", "8")
    allowed = json.loads(given["--run.allow_change"])
    assert allowed == ["optim.lr", "batch_size", "accumulate", "memory.micro_batch_size"]


def test_the_supervisor_starts_without_torch():
    code = "import sys, trainer.cli, trainer.supervise.supervisor; print({'torch', 'numpy', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def ended(attempt, seconds=120.0):
    until = time.monotonic() + seconds
    while (ending := attempt.wait()) is None:
        assert time.monotonic() < until
    return ending


def started(code):
    return Attempt([sys.executable, "-c", code])


def test_an_attempt_tells_its_first_error_and_passes_on_what_it_says(capfd):
    said = "a\\n[rank 1] trainer: error: first\\ntrainer: error: second"
    ending = ended(started(f"import sys; print('{said}', file=sys.stderr); sys.exit(3)"))
    assert (ending, ending.exit_code) == (AttemptResult(3, "first"), 3)
    assert "trainer: error: second" in capfd.readouterr().err


def test_without_an_error_of_the_trainer_the_last_words_are_told(capfd):
    assert ended(started("1 / 0")) == AttemptResult(1, "ZeroDivisionError: division by zero")
    echo = "print('trainer: error: another rank ended; its message says why', file=sys.stderr)"
    assert ended(started(f"import sys; {echo}; 1 / 0")).cause == "ZeroDivisionError: division by zero"
    assert ended(started(f"import sys; {echo}; sys.exit('and no word more')")).cause.startswith("another rank ended")
    killed = ended(started("import os; os.write(2, b'step 7/20\\n'); os.kill(os.getpid(), 9)"))
    assert (killed.code, killed.exit_code, killed.describe()) == (-9, 137, "killed by SIGKILL")


def test_no_process_of_an_attempt_outlives_it(capfd):
    code = "import subprocess, sys; sys.exit(str(subprocess.Popen(['sleep', '600']).pid))"  # printed, exit code 1
    pid = int(ended(started(code)).cause)
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_the_cut_is_what_this_attempt_has_written_last(tmp_path):
    assert (attempts(tmp_path), known_cut(tmp_path, before=0)) == (0, None)
    status = {"cut": {"batch_size": 64, "micro_batch_size": 8}, "attempt": 2}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert attempts(tmp_path) == 2
    assert known_cut(tmp_path, before=1) == (64, 8)
    assert known_cut(tmp_path, before=2) is None  # the attempt has ended before it wrote any
    for unknown in (None, [64, 8], {}, {"batch_size": 64, "micro_batch_size": "8"}):
        (tmp_path / "status.json").write_text(json.dumps(status | {"cut": unknown}))
        assert known_cut(tmp_path, before=1) is None
    (tmp_path / "status.json").write_text("[" * 100_000)
    assert known_cut(tmp_path, before=0) is None


@pytest.mark.parametrize(
    ("ending", "kills", "expected"),
    [
        (AttemptResult(1, "out of memory in backward on rank 0"), 0, True),
        (AttemptResult(-signal.SIGKILL, ""), 1, True),
        (AttemptResult(-signal.SIGKILL, ""), 0, False),
        (AttemptResult(1, "rank 1 (pid 7 on host) was killed or crashed"), 1, True),
        (AttemptResult(1, "ZeroDivisionError"), 1, False),
    ],
)
def test_out_of_memory_is_told_from_other_ends(ending, kills, expected):
    assert ran_out_of_memory(ending, kills) is expected


def test_the_kernel_s_count_is_that_of_the_own_group(tmp_path, monkeypatch):
    assert memory.count_oom_kills() >= 0
    for name in ("VMSTAT", "CGROUPS", "CGROUP_ROOT"):
        monkeypatch.setattr(memory, name, tmp_path / name)
    assert memory.count_oom_kills() == 0
    (tmp_path / "VMSTAT").write_text("nr_free_pages 12\noom_kill 7\n")
    assert memory.count_oom_kills() == 7
    (tmp_path / "CGROUPS").write_text("1:name=x:/y\n0::/job/step\n")
    (tmp_path / "CGROUP_ROOT" / "job" / "step").mkdir(parents=True)
    (tmp_path / "CGROUP_ROOT" / "job" / "step" / "memory.events").write_text("oom 3\noom_kill 2\n")
    assert memory.count_oom_kills() == 2


@pytest.fixture
def forked(tmp_path, monkeypatch, capfd):
    """A function: supervise in this process, with forks for attempts; exit code, journal, what it said."""
    fork_processes(monkeypatch)
    recipe = own_recipe(tmp_path, SETTINGS)

    def supervise(*flags, own=()):
        words = [*own, "--restarts=9", "--backoff=0.2", "--"]
        words += [recipe, "--run.dir", tmp_path / "run", *flags]
        code = run_command([str(word) for word in words])
        return code, json.loads((tmp_path / "run" / "supervisor.json").read_text()), capfd.readouterr().err

    return supervise


@pytest.mark.slow
def test_a_killed_run_is_finished_by_the_next_attempt(forked, tmp_path):
    code, journal, text = forked("--model.what=kill", f"--model.done={tmp_path / 'done'}")
    assert (code, journal["status"]) == (0, "finished")
    first, second = journal["attempts"]
    assert (first["exit_code"], second["exit_code"]) == (-9, 0)
    assert (first["from_step"], first["step"], second["from_step"], second["step"]) == (None, 5, 5, 20)
    for part in ("killed by SIGKILL", "newest checkpoint: step 5; restart 1 of 9 in 0.2 s", "resuming from"):
        assert part in text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 20
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status.pop("plan").startswith("batch 24 = 1 rank × 2 micro-batches of 12")
    assert status == {"cut": {"batch_size": 24, "micro_batch_size": 12}, "attempt": 2, "status": "finished"}


@pytest.mark.slow
def test_a_setting_that_cannot_work_is_not_tried_again(forked):
    code, journal, text = forked("--batch_size=24", "--accumulate=5", "--memory.micro_batch_size=7")
    assert (code, len(journal["attempts"]), "not restarting" in text) == (2, 1, True)


@pytest.mark.slow
def test_the_same_crash_again_and_again_ends_the_run(forked):
    code, journal, text = forked("--model.what=raise", "--model.at=3")
    assert (code, [attempt["exit_code"] for attempt in journal["attempts"]]) == (1, [1, 1])
    assert "2 crashes in a row without a checkpoint after the start" in text
    assert "ZeroDivisionError" in journal["attempts"][0]["cause"]


@pytest.mark.slow
def test_out_of_memory_is_mended_by_smaller_micro_batches(forked, tmp_path):
    code, journal, text = forked("--model.most=3", "--run.recover=false")
    assert (code, [attempt["exit_code"] for attempt in journal["attempts"]]) == (0, [1, 1, 0])
    assert "restart 2 of 9 with micro-batches of 3" in text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["batch_size"], summary["micro_batch_size"], summary["steps"]) == (24, 3, 20)


@pytest.mark.slow
def test_a_killed_rank_is_replaced_with_all_others(forked, tmp_path):
    flags = ["--model.what", "kill", "--model.rank", "1", "--model.done", str(tmp_path / "done")]
    code, journal, text = forked(*flags, own=("--nproc", "2"))
    assert code == 0, text
    codes = [attempt["exit_code"] for attempt in journal["attempts"]]
    assert codes[-1] == 0
    assert len(codes) == 2
    assert journal["attempts"][1]["from_step"] == 5


@pytest.mark.slow
@pytest.mark.parametrize(("whole_job", "number"), [(True, signal.SIGTERM), (False, signal.SIGHUP)])
def test_asked_to_stop_it_passes_that_on_once_and_leaves_with_the_requeue_code(supervise, whole_job, number):
    run = supervise("--model.seconds", "0.05", "--max_steps", "2000", own=("--nproc", "2"))
    run.wait_for_step(10)
    for pid in run.pids() if whole_job else [run.process.pid]:
        os.kill(pid, number)
    assert run.wait(60) == 75, run.text
    assert "everything is saved" in run.text
    assert run.codes == [75]
    assert run.journal["attempts"][0]["step"] >= 10
    assert run.journal["status"] == "stopped"
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_preempted_rank_is_not_the_end(supervise):
    run = supervise("--model.seconds", "0.05", "--max_steps", "60")
    run.wait_for_step(10)
    (own,) = [pid for pid in run.pids() if pid != run.process.pid]
    os.kill(own, signal.SIGTERM)
    assert run.wait() == 0, run.text
    assert run.codes == [75, 0]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting", "training"])
def test_a_killed_supervisor_leaves_no_process_behind(supervise, moment):
    run = supervise("--model.seconds", "0.05", "--max_steps", "2000", own=("--nproc", "2"))
    if moment == "training":
        run.wait_for_step(10)
    else:
        until = time.monotonic() + 60
        while len(run.pids()) < 3:  # the second rank imports what it needs
            assert time.monotonic() < until, run.text
            time.sleep(0.02)
    run.process.kill()
    run.process.wait()
    run.assert_nothing_left(30.0)


@pytest.mark.slow
def test_a_second_signal_kills_and_the_second_supervisor_is_refused(supervise):
    run = supervise("--model.seconds", "0.05", "--max_steps", "2000")
    run.wait_for_step(10)
    command = [sys.executable, "-m", "trainer", "run", "--", "vit_digits", "--run.dir", str(run.run_dir)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert "is in use by the run of pid" in second.stderr
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(30) == 137, run.text
    run.assert_nothing_left()
