import contextlib
import fcntl
import io
import os
import struct
import termios

import pytest

from trainer.report.progress import Progress
from trainer.report.summary import Speed


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


FIGURES = {"loss": 0.43123, "lr": 1.9e-3, "speed": Speed(1234.4), "memory": "0.52 GB host peak", "epoch": 5}


def take_steps(progress, steps, clock=None):
    for step in steps:
        progress.step(step, **FIGURES)
        if clock is not None:
            clock.now += 1.0


def steps_shown(stream):
    return [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines() if line.startswith("step ")]


def test_a_plain_line_holds_every_figure_with_its_unit():
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=Clock())
    progress.start(960)
    take_steps(progress, [120])
    progress.step(960, **FIGURES | {"loss": float("nan"), "skipped": 2})
    line = " · epoch 5 · loss {} · lr 1.9e-03 · 1,234 samples/s · memory 0.52 GB host peak"
    expected = ["step 120/960" + line.format("0.4312"), "step 960/960" + line.format("nan") + " · 2 skipped steps"]
    assert stream.getvalue().splitlines() == expected


def test_a_line_says_of_speed_what_is_known_and_of_data_what_is_worth_it():
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=Clock())
    progress.start(2)
    progress.step(1, **FIGURES | {"speed": Speed(8.0, 1234.6, 0.049, None)})
    progress.step(2, **FIGURES | {"speed": Speed(8.0, None, 0.05, 0.4136)})
    shown = [line.split(" · ")[4:-1] for line in stream.getvalue().splitlines()]
    assert shown == [["8.00 samples/s", "1,235 tokens/s"], ["8.00 samples/s", "data 5 %", "MFU 41.4 %"]]


def test_lines_come_every_five_seconds_and_first_and_last_always():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock)
    progress.start(12)
    take_steps(progress, range(1, 13), clock)
    assert steps_shown(stream) == [1, 6, 11, 12]
    progress.close()
    assert steps_shown(stream) == [1, 6, 11, 12]


def test_an_early_end_still_shows_its_last_step_once_even_after_other_messages():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock)
    progress.start(100, first_step=2)
    take_steps(progress, [3, 4], clock)
    progress.message("stopping")
    progress.close()
    progress.close()
    assert steps_shown(stream) == [3, 4]
    assert "stopping" in stream.getvalue()


@pytest.mark.parametrize("make", [io.StringIO, Terminal])
def test_evaluations_and_messages_are_lines_of_their_own(make):
    stream = make()
    progress = Progress(stream=stream, clock=Clock())
    progress.message("before")
    progress.start(10)
    take_steps(progress, [1, 2])
    progress.evaluation(2, "val", {"loss": 0.5, "accuracy": 0.98765})
    progress.close()
    progress.message("after")
    lines = stream.getvalue().replace("\r", "\n").splitlines()
    assert {"before", "val after step 2 · loss 0.5000 · accuracy 98.77 %", "after"} <= {*lines}


def test_a_terminal_gets_a_bar_that_ends_at_the_last_step():
    stream = Terminal()
    progress = Progress(stream=stream, clock=Clock())
    progress.start(10, first_step=4)
    take_steps(progress, range(5, 11))
    progress.close()
    last = stream.getvalue().split("\r")[-1]
    assert last.startswith("100%|")
    assert "10/10" in last
    assert "step 10/10" not in stream.getvalue()


def read_all(screen):
    """What was written to a terminal whose other end is closed: then its last read fails instead of waiting."""
    shown = b""
    with contextlib.suppress(OSError):
        while piece := os.read(screen, 4096):
            shown += piece
    os.close(screen)
    return shown.decode()


@pytest.mark.parametrize(("columns", "expected"), [(120, "| 3/3 "), (0, "step 3/3 · ")])
def test_a_terminal_that_does_not_know_its_width_gets_lines(columns, expected):
    screen, stream = os.openpty()
    fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with open(stream, "w", encoding="utf-8") as terminal:
        progress = Progress(stream=terminal, clock=Clock())
        progress.start(3)
        take_steps(progress, [1, 2, 3])
        progress.close()
    shown = read_all(screen)
    assert expected in shown
    assert ("100%|" in shown) == (columns > 0)


def on_a_terminal(columns, show):
    """What a bar of 690 steps is last drawn as; ``show`` gives it something to show."""
    screen, stream = os.openpty()
    fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with open(stream, "w", encoding="utf-8") as terminal:
        progress = Progress(stream=terminal, clock=Clock())
        progress.start(690)
        show(progress)
        progress.close()
    return read_all(screen).rstrip().split("\r")[-1].strip()


@pytest.mark.parametrize(
    ("columns", "cells", "shown"),
    [
        (30, 1, []),
        (40, 1, []),
        (45, 1, ["loss 0.4312"]),
        (60, 10, ["epoch 5", "loss 0.4312"]),
        (80, 10, ["epoch 5", "loss 0.4312", "1,234 samples/s"]),
        (100, 10, ["epoch 5", "loss 0.4312", "lr 1.9e-03", "1,234 samples/s"]),
        (120, 10, ["epoch 5", "loss 0.4312", "lr 1.9e-03", "1,234 samples/s", "memory 0.52 GB host peak"]),
    ],
)
def test_a_narrow_terminal_shows_fewer_figures_each_whole_and_ten_cells_of_the_bar(columns, cells, shown):
    last = on_a_terminal(columns, lambda progress: progress.step(690, **FIGURES))
    assert len(last) <= columns
    _, bar, rest = last.split("|")
    assert len(bar) >= cells
    assert rest.partition(", ")[2].split(" · ") == (shown or [""])


def test_what_happened_is_shown_before_all_else_and_a_long_text_ends_with_a_word():
    last = on_a_terminal(60, lambda progress: progress.step(690, **FIGURES | {"skipped": 2}))
    assert last.endswith(", loss 0.4312 · 2 skipped steps")
    last = on_a_terminal(
        60, lambda progress: progress.count(3, 9, "12 micro-batches of 1, single, selective, offloaded")
    )
    assert last.endswith(", 12 micro-batches of 1, single, …")


def test_a_plain_line_says_how_long_the_rest_takes():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock)
    progress.start(100, first_step=20)
    clock.now = 30.0
    take_steps(progress, [40, 100], clock)
    first, last = stream.getvalue().splitlines()
    assert first.startswith("step 40/100 · 01:30 left · epoch 5 · ")
    assert last.startswith("step 100/100 · epoch 5 · ")


@pytest.mark.parametrize(("options", "expected"), [({"enabled": False}, "notice\n"), ({"rank": 1}, "")])
@pytest.mark.parametrize("make", [io.StringIO, Terminal])
def test_only_a_notice_is_shown_where_progress_is_hidden_and_nothing_on_other_ranks(options, expected, make):
    stream = make()
    progress = Progress(**options, stream=stream, clock=Clock())
    progress.start(3)
    take_steps(progress, [1, 2, 3])
    progress.count(1, 3, "counted")
    progress.evaluation(3, "val", {"loss": 1.0})
    progress.message("nothing")
    progress.notice("notice")
    progress.close()
    assert stream.getvalue() == expected


def test_work_whose_total_changes_is_counted_in_lines_and_on_a_bar():
    for stream in (io.StringIO(), Terminal()):
        clock = Clock()
        progress = Progress(stream=stream, clock=clock)
        progress.start(0)
        for done, total in ((1, 9), (2, 9), (3, 4)):
            progress.count(done, total, f"plan {done}")
            clock.now += 2
        progress.close()
        last = stream.getvalue().rstrip("\n").split("\r")[-1]
        if isinstance(stream, Terminal):
            assert last.startswith(" 75%|")
            assert "3/4" in last
            assert "plan 3" in last
        else:
            assert last == "1/9 · plan 1\n3/4 · plan 3"
