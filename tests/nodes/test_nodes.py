"""The same recipe on two machines: under torchrun as it is typed, and what happens when one of them is not well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import LONG
from helpers.resumed import assert_same_weights, losses
from helpers.started import FOREIGN, own_recipe
from nodes.hosts import NETWORK, Host, Hosts, Process, why_not

from trainer.supervise.attempt import newest_step

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(600)]

LONGEST = 40.0
"""Seconds that the end of both sides of a cut may take; twenty-five are promised, on machines of their own."""

TOLERANCE = 1e-9

AUTO = ("--run.resume", "auto")
SLOW = (*AUTO, "--model.seconds", "0.1", "--run.hang_after", "20")
SHORT = ("--max_steps", "3")
PORT = 29500
LAUNCH = Path(__file__).parents[2] / "launch" / "nodes.sh"
SETTINGS = """
    model=Disturbed("custom", patch_size=4, layers=2, heads=2, width=16, mlp_width=32, dropout=0.1),
    optim=Optim("sgd", lr=0.1, momentum=0.9, clip_norm=1.0),
    batch_size=48,
    max_steps=60,
    epochs=10,
    memory=Memory(micro_batch_size=12, precision="64-true"),  # in which rounding stays small
    checkpoint=Checkpoint(every=5, asynchronous=False),
"""
REASON = why_not()


@pytest.fixture
def hosts(tmp_path):
    """``nodea`` and ``nodeb``."""
    if REASON is not None:
        pytest.skip(REASON)
    with Hosts(tmp_path, "nodea", "nodeb") as pair:
        yield pair


def environment(**more: str) -> dict[str, str]:
    """That of a person who starts a run by hand."""
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith((*FOREIGN, "TORCH_", "GLOO_", "RDZV_"))
    }
    python = str(Path(sys.executable).parent)
    return clean | {"OMP_NUM_THREADS": "1", "PATH": f"{python}:{clean.get('PATH', '')}"} | more


def torchrun(
    host: Host, head: Host, count: str, folder: Path, *flags: str, ranks: int = 1, own: tuple = (), head_as: str = ""
) -> Process:
    """Start ``torchrun … -m trainer fit`` on ``host``, as it is typed, with flags of its ``own``."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", count, "--nproc-per-node", str(ranks)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head_as or head.name}:{PORT}", *own]
    words += ["-m", "trainer", "fit", str(recipe_in(folder)), "--run.dir", str(folder / "run"), *flags]
    return host.start(words, folder / f"{host.name}.txt", environment(), folder)


def nodes(
    host: Host, head: Host, count: str, folder: Path, *flags: str, private: Path | None = None, **more: str
) -> Process:
    """Start ``launch/nodes.sh`` on ``host``, one rank, with variables as given."""
    words = [str(LAUNCH), head.name, count, "1", str(recipe_in(folder)), "--run.dir", str(folder / "run"), *flags]
    variables = environment(**{"LAST_CALL": "5"} | more)
    return host.start(words, folder / f"{host.name}.txt", variables, folder, private)


def recipe_in(folder: Path) -> Path:
    """The recipe, as a file in ``folder``."""
    path = folder / "own.py"
    return path if path.exists() else own_recipe(folder, SETTINGS)


def samples(folder: Path) -> list[list[set[int]]]:
    """What TRAINER_TEST_SAMPLES has gathered there: of every process, its micro-batches in order."""
    starts = [[set(json.loads(line)) for line in path.read_text().splitlines()] for path in sorted(folder.iterdir())]
    return [start for start in starts if start]


def assert_same_samples(starts: list[list[set[int]]], reference: list[set[int]]) -> None:
    """Every process took a piece of the batches of the undisturbed run, and together they took all of them."""
    taken = [set[int]() for _ in reference]
    for start in starts:
        step = next(number for number, batch in enumerate(reference) if start[0] <= batch)
        for micro_batch in start:
            if not micro_batch <= reference[step]:
                step += 1
            assert micro_batch <= reference[step], f"other samples than those of step {step + 1}"
            taken[step] |= micro_batch
    assert taken == reference


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of the run of a single process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "samples").mkdir()
    words = [sys.executable, "-m", "trainer", "fit", str(recipe_in(folder)), "--run.dir", str(folder / "run")]
    own = environment(TRAINER_TEST_SAMPLES=str(folder / "samples"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONG, env=own, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def assert_same_run(run_dir, other):
    assert losses(run_dir) == pytest.approx(losses(other), rel=TOLERANCE)
    assert_same_weights(run_dir, other, TOLERANCE)


def finish(*runs):
    assert [run.wait() for run in runs] == [0] * len(runs), "\n\n".join(run.text for run in runs)


def wait_for_step(folder, step, run, seconds=LONG):
    """Until there is a checkpoint of ``step``."""
    until = time.monotonic() + seconds
    while newest_step(folder / "run") < step:
        assert time.monotonic() < until, f"no checkpoint of step {step} in:\n{run.text}"
        assert run.process.poll() is None, f"ended before step {step}:\n{run.text}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, ()), (1, ("--memory.strategy", "fsdp")), (2, ("--memory.strategy", "fsdp", "--memory.replicas", "2"))],
    ids=["ddp", "fsdp", "hsdp"],
)
def test_two_machines_give_the_weights_of_one_process(ranks, flags, hosts, alone, tmp_path):
    finish(*(torchrun(host, hosts[0], "2", tmp_path, *flags, ranks=ranks) for host in hosts))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"]) == (2 * ranks, 60)
    assert_same_run(tmp_path / "run", alone / "run")


@pytest.mark.parametrize("how", ["kill", "crash"])
def test_a_machine_leaves_and_comes_back(how, hosts, alone, tmp_path):
    """``kill``: its processes end. ``crash``: nothing is heard of it; it had the first rank, and the lock names it."""
    (tmp_path / "samples").mkdir()
    head, other = hosts if how == "kill" else reversed(hosts)

    def start(host):
        return nodes(host, head, "1:2", tmp_path, *SLOW, TRAINER_TEST_SAMPLES=str(tmp_path / "samples"))

    stays, leaves = start(head), start(other)
    wait_for_step(tmp_path, 10, leaves)
    if how == "kill":
        leaves.kill()
    else:
        other.crash()
    stays.wait_for("resuming from")
    stays.wait_for("plan: batch 48 = 1 rank × 4 micro-batches")
    assert f"{other.name}" in stays.errors()[0] or "store of the ranks" in stays.errors()[0]
    wait_for_step(tmp_path, 15, stays)
    if how == "crash":
        other.boot()
    finish(stays, start(other))
    assert "SIGTERM received: saving a checkpoint" in stays.text  # when the other one came back
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2
    assert_same_run(tmp_path / "run", alone / "run")
    (whole,) = samples(alone / "samples")
    reference = [set().union(*whole[first : first + 4]) for first in range(0, len(whole), 4)]
    assert_same_samples(samples(tmp_path / "samples"), reference)


def test_a_cut_link_ends_both_sides_and_the_run_goes_on_when_it_is_mended(hosts, alone, tmp_path):
    head, other = hosts

    def start():
        return [nodes(host, head, "2", tmp_path, *SLOW, RESTARTS="0") for host in hosts]

    runs = start()
    wait_for_step(tmp_path, 10, runs[0])
    other.cut()
    time.sleep(2.0)
    other.restore()
    wait_for_step(tmp_path, 20, runs[0])  # it was too short to matter
    other.cut()
    until = time.monotonic() + LONGEST
    assert all(run.wait(until - time.monotonic()) != 0 for run in runs)
    assert "rank 1 (pid" in runs[0].errors()[0]
    assert "on nodeb) gave no sign for 10 s: it or its machine is gone, or cannot be reached" in runs[0].errors()[0]
    assert f"the store of the ranks, at {NETWORK}.1, has not answered for 10 s" in runs[1].errors()[0]
    other.restore()
    finish(*start())
    assert runs[0].text.count("resuming from") == 1
    assert_same_run(tmp_path / "run", alone / "run")


def test_a_run_directory_of_each_machines_own_is_refused(hosts, tmp_path):
    recipe_in(tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    runs = []
    for host in hosts:
        flags = ("--run.dir", str(disk / "run"), *SHORT)
        runs.append(nodes(host, hosts[0], "2", tmp_path, *flags, private=disk, RESTARTS="0"))
    assert all(run.wait() != 0 for run in runs)
    for run in runs:
        assert f"run.dir={disk}/run is not one directory for all machines: nodeb does not see" in run.errors()[0]


def test_a_head_that_calls_itself_a_loopback_address_is_refused_by_name(hosts, tmp_path):
    for host in hosts:
        host.names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
    run = nodes(hosts[0], hosts[0], "2", tmp_path)
    assert run.wait() == 2
    assert "on nodea, nodea is 127.0.1.1, which no other machine can reach" in run.text


def test_gloo_is_told_another_interface_than_the_loopback(hosts, tmp_path):
    """torchrun as it is typed, with the addresses that it needs; its ranks find the interface by themselves."""
    for host in hosts:
        host.names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
    runs = []
    for host in hosts:
        own = ("--local-addr", host.address, "--rdzv-conf", f"is_host={int(host is hosts[0])}")
        runs.append(torchrun(host, hosts[0], "2", tmp_path, *SHORT, own=own, head_as=hosts[0].address))
    finish(*runs)
    assert "nodeb does not lead to this machine from others: using eth0" in runs[1].text
