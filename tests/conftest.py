"""Fixtures for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from multiprocessing.util import Finalize
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on the network

import pytest
from filelock import FileLock
from helpers.ranks import PICTURES, end_rank_pools, rank_pool
from helpers.samples import make_samples
from hypothesis import HealthCheck, settings

pytest_plugins = ["helpers.golden"]

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the runs that are started would inherit that it is ignored

settings.register_profile(
    "trainer", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("trainer")

# One folder for all that tests, the processes that they kill, and libraries leave behind.
if "PYTEST_XDIST_WORKER" not in os.environ:
    usual = tempfile.gettempdir()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor_{os.getuid()}")  # kept for the next time
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)  # where pytest keeps the folders of the last three runs
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="trainer-tests-")
    os.chmod(tempfile.tempdir, 0o755)  # Slurm's and munge's daemons are other users
    # Workers have ended by then; -101 is after the folder that multiprocessing itself removes.
    Finalize(None, shutil.rmtree, (tempfile.tempdir, True), exitpriority=-101)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """No test inherits another's environment: a rank's number or port that was left there makes a run wait for ever.

    Nor the folders of its recipes on the path, from which ranks that are started later would import.
    """
    before, path = dict(os.environ), list(sys.path)
    result = yield
    sys.path[:] = path
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    return result


@pytest.fixture(autouse=True)
def no_forecast(request, monkeypatch):
    """Runs within a test's own process do not predict their memory, but for tests with the marker ``forecast``."""
    if request.node.get_closest_marker("forecast") is None:
        monkeypatch.setattr("trainer.run.setup.start_prediction", lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def _forks_can_compute_gradients():
    """The first backward of this process is one of the CPU.

    If it came after fake CUDA tensors, autograd would start threads for their device. Forks of this process, such as
    predictions, could then compute no gradients.
    """
    import torch

    if torch.cuda.device_count() == 0:
        torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture
def no_pictures(monkeypatch):
    """Runs draw nothing: two pictures take longer than the few steps of a test."""
    for name in PICTURES:
        monkeypatch.setattr(name, lambda *_: None)


@pytest.fixture
def ranks():
    """A function from a world size to its :class:`RankPool`; pools are shared by the tests of a file."""
    return rank_pool


@pytest.fixture(scope="module", autouse=True)
def _no_idle_pools():
    """Every group of ranks that a test has made keeps a thread awake, a hundred times a second."""
    yield
    end_rank_pools()


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the tables that tests have made: what they print themselves is lost when they run in workers."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "table" and report.when == "call":
                terminalreporter.write_line(f"\n{text}")


def _real_samples() -> Path | None:
    """The folder of real samples: $TRAINER_TEST_DATA, or shared/data beside the repository; None if there is none."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("TRAINER_TEST_DATA", beside)).resolve()  # some tests change the working directory
    return folder if folder.is_dir() else None


def pytest_report_header() -> str:
    return f"sample data: {_real_samples() or 'generated (TRAINER_TEST_DATA names a folder of real samples)'}"


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items) -> None:
    """Mark the tests that read sample data, so that ``pytest -m samples`` runs them alone, and the slow cases of tests
    with the marker ``first``."""
    cases: Counter[str] = Counter()
    for item in items:
        if "sample_data" in item.fixturenames:
            item.add_marker("samples")
        first = item.get_closest_marker("first")
        if first is not None and item.get_closest_marker("slow") is None:
            function = item.nodeid.partition("[")[0]
            cases[function] += 1
            if cases[function] > first.args[0]:
                item.add_marker("slow")


@pytest.fixture(scope="session")
def sample_data() -> Path:
    """The folder of real samples, or one with generated samples, which all workers share."""
    real = _real_samples()
    if real is not None:
        return real
    shared = Path(tempfile.gettempdir())  # of the process that started the workers: see above
    folder = shared / "samples"
    with FileLock(shared / "samples.lock"):
        if not (folder / "complete").exists():
            make_samples(folder)
            (folder / "complete").touch()
    return folder
