"""Trains a recipe on the workers of Ray Train: python launch/ray_train.py vit_digits --workers 2 --run.dir runs/mine"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.train import TrainingFailedError


def main(argv: Sequence[str]) -> int:
    """Train on Ray's workers and return the exit code of ``trainer fit``.

    0, 2 for an invalid setting, and 1 if the workers failed more often than ``--max-failures``.
    """
    options, fit_flags = parse(argv)
    # Otherwise every line of a worker is printed twice, the second time by Ray's log.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        return refuse(f"launch/ray_train.py needs Ray ({error}): pip install 'exactbatch-trainer[ray]'")

    folder = os.getcwd()
    os.chdir(os.path.dirname(os.path.abspath(__file__)))  # Ray's workers import from the working directory first
    ray.init()
    resources = {"CPU": options.cpus_per_worker} | ({"GPU": 1.0} if options.use_gpu else {})
    if lacking := missing_resources(ray.cluster_resources(), resources, options.workers):
        return refuse(lacking)
    trainer = TorchTrainer(
        train,
        train_loop_config={"fit": fit_flags, "folder": folder},
        scaling_config=ScalingConfig(
            num_workers=options.workers, use_gpu=options.use_gpu, resources_per_worker=resources
        ),
        # With offloaded optimizer state, gradients are summed in host memory, which NCCL cannot do.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if options.use_gpu else "gloo"),
        run_config=RunConfig(
            # Workers that cannot start for lack of resources count as a failure of Ray's controller.
            failure_config=FailureConfig(
                max_failures=options.max_failures, controller_failure_limit=options.max_failures
            )
        ),
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        ray.shutdown()  # ends the workers' log, so that the message below comes last
        print("\n".join(first_lines(error)), file=sys.stderr)
        return 1
    ray.shutdown()
    return refuse(result.return_value) if result.return_value else 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options and the arguments of ``trainer fit``."""
    parser = argparse.ArgumentParser(
        usage="ray_train.py RECIPE --run.dir DIR --workers N [options] [flags of trainer fit]",
        description="Train a recipe on the workers of Ray Train.",
        allow_abbrev=False,
    )
    parser.add_argument("--workers", type=int, required=True, help="processes, over all machines of the Ray cluster")
    parser.add_argument("--use-gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--cpus-per-worker", type=float, default=1.0, help="CPUs that each worker reserves (1)")
    parser.add_argument("--max-failures", type=int, default=3, help="how often failed workers are restarted (3)")
    options, rest = parser.parse_known_args(argv)
    if options.workers < 1:
        parser.error("--workers must be at least 1")
    if not any(word.partition("=")[0] == "--run.resume" for word in rest):
        rest += ["--run.resume", "auto"]
    return options, rest


def missing_resources(present: dict[str, float], each: dict[str, float], workers: int) -> str | None:
    """Return why a local Ray could never start the workers; ``None`` for a cluster, which may still grow."""
    if os.environ.get("RAY_ADDRESS"):
        return None
    for name, amount in each.items():
        if amount * workers > present.get(name, 0):
            return (
                f"--workers {workers} with {amount:g} {name} each need {amount * workers:g} {name}, and this Ray has "
                f"{present.get(name, 0):g}: ask for fewer, or name a larger cluster in RAY_ADDRESS"
            )
    return None


def train(settings: dict[str, Any]) -> str | None:
    """Train on a worker, in the folder from which this script was started.

    Args:
        settings: the arguments of ``trainer fit`` (fit) and the folder.

    Returns:
        The error of an invalid setting. If it were raised, Ray would restart the workers for the same error.

    Raises:
        RunError: for any other failure, with the last line that ``trainer fit`` would have printed.
    """
    from trainer.cli import fit_command
    from trainer.errors import RecipeError, RunError, require
    from trainer.system.error_reports import describe_error, get_location, one_line_message

    try:
        folder = settings["folder"]
        require(os.path.isdir(folder), f"{folder} is not on every machine: start from a folder on shared storage")
        os.chdir(folder)  # paths in recipe and flags are relative to it
        fit_command(settings["fit"])
    except RecipeError as error:
        return one_line_message(error)
    except Exception as error:
        place = get_location(error)
        known = isinstance(error, RunError) or place is None
        raise RunError(
            f"trainer: error: {describe_error(error) if known else f'{place}: {describe_error(error)}'}"
        ) from error
    return None


def first_lines(error: TrainingFailedError) -> list[str]:
    """Return one line per failed worker that says why it ended."""
    failures = getattr(error, "worker_failures", {})
    if not failures:
        return [f"trainer: error: {error}"]
    return [f"[rank {rank}] {first_line(str(failure))}" for rank, failure in sorted(failures.items())]


def first_line(text: str) -> str:
    """Return the trainer's error line in a worker's traceback, or the first line of Ray's report of a lost worker."""
    marked = [line for line in text.splitlines() if "trainer: error: " in line]
    return marked[0].partition("RunError: ")[2] or marked[0] if marked else text.strip().partition("\n")[0]


def refuse(message: str) -> int:
    """Print an error and return the exit code for an invalid setting."""
    print(f"trainer: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
