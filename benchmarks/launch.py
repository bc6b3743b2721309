"""Every launcher of one machine: what it says, whether the weights are those of one process, and the time to step 1.

    python benchmarks/launch.py [--rounds 3] [--only torchrun,slurm] [--add] [--out NAME]

Each launcher starts ``recipes/launch_small.py``, and a bare script that imports torch and Fabric, has Fabric launch as
many ranks, and ends: what the former takes beyond the latter is ours. Launchers take turns, medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, Record, machine, table

ROOT = Path(__file__).parents[1]
RECIPE = str(Path(__file__).parent / "recipes" / "launch_small.py")
FIT = ["-m", "trainer", "fit", RECIPE]
PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FABRIC_RUN = [
    PYTHON,
    "-c",
    "from lightning.fabric.cli import _main; _main()",
    "run",
    "--accelerator=cpu",
    "--devices=2",
]
ACCELERATE = [PYTHON, "-m", "accelerate.commands.launch", "--num_machines=1", "--mixed_precision=no"]
ACCELERATE += ["--dynamo_backend=no"]

BARE = """
import os
import sys
import time
import torch
from lightning.fabric import Fabric
ranks = int(sys.argv[1])
fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
if "LT_CLI_USED" not in os.environ:  # fabric run has it launched already
    fabric.launch()
fabric.barrier()
if fabric.global_rank == 0:
    print("READY", time.process_time(), file=sys.stderr, flush=True)
"""
LONGEST = 170.0
FOREIGN = ("LT_", "TORCHELASTIC_", "MASTER_", "ACCELERATE_", "SLURM_", "OMPI_", "PMI_")
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
PHASES = ("imports and planning", "data", "model", "prediction", "first step")


@dataclass(frozen=True)
class Launcher:
    """A way to start the recipe.

    Args:
        shown: the command as a person types it.
        ours: what starts the recipe, before the flags of ``trainer fit``.
        bare: what starts the bare script, before its path and the number of ranks.
        ranks: how many come up.
        there: whether this machine has it.
    """

    shown: str
    ours: tuple[str, ...]
    bare: tuple[str, ...]
    ranks: int = 2
    there: Callable[[], bool] = lambda: True


def slurm_answers() -> bool:
    """Whether there is a Slurm, and it takes jobs."""
    if shutil.which("srun") is None:
        return False
    done = subprocess.run(["srun", "-n1", "--immediate=5", "true"], capture_output=True, timeout=30)
    return done.returncode == 0


SRUN = ("srun", "--nodes=1", "--ntasks-per-node=2")
LAUNCHERS = {
    "python": Launcher("trainer fit R", (PYTHON, *FIT), (PYTHON,), 1),
    "python recipe.py": Launcher("python R.py", (PYTHON, RECIPE), (PYTHON,), 1),
    "run.devices": Launcher("trainer fit R --run.devices 2", (PYTHON, *FIT, "--run.devices", "2"), (PYTHON,)),
    "torchrun": Launcher("torchrun --standalone --nproc-per-node 2 -m trainer fit R", (*TORCHRUN, *FIT), (*TORCHRUN,)),
    "torchrun.sh": Launcher("launch/torchrun.sh 2 R", (str(ROOT / "launch/torchrun.sh"), "2", RECIPE), (*TORCHRUN,)),
    "fabric run": Launcher("fabric run --accelerator cpu --devices 2 R.py", (*FABRIC_RUN, RECIPE), (*FABRIC_RUN,)),
    "accelerate alone": Launcher(
        "accelerate launch --cpu --num_processes 1 R.py",
        (*ACCELERATE, "--cpu", "--num_processes=1", RECIPE),
        (*ACCELERATE, "--cpu", "--num_processes=1"),
        1,
    ),
    "accelerate": Launcher(
        "accelerate launch --multi_gpu --num_processes 2 R.py",
        (*ACCELERATE, "--multi_gpu", "--num_processes=2", RECIPE),
        (*ACCELERATE, "--multi_gpu", "--num_processes=2"),
    ),
    "slurm": Launcher(
        "srun --nodes 1 --ntasks-per-node 2 trainer fit R", (*SRUN, PYTHON, *FIT), (*SRUN, PYTHON), there=slurm_answers
    ),
}


class Watched:
    """A command, watched until it prints something.

    Args:
        command: what to start, in a process group of its own.
        marks: where the recipe notes its times.
    """

    def __init__(self, command: Sequence[str], marks: Path) -> None:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN) and name not in RANKS}
        kept |= {"OMP_NUM_THREADS": "1", "LAUNCH_MARKS": str(marks)}
        kept["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{kept.get('PATH', '')}"
        self.lines: list[str] = []
        self.began = time.time()
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=kept, start_new_session=True
        )

    def until(self, pattern: str) -> float:
        """Seconds from the start until a line with ``pattern``."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                return time.time() - self.began
        raise SystemExit(f"no {pattern!r} in:\n" + "\n".join(self.lines))

    def finish(self) -> None:
        """Let it end."""
        assert self.process.stderr is not None
        self.lines += [line.rstrip() for line in self.process.stderr]
        if self.process.wait(LONGEST) != 0:
            raise SystemExit("\n".join(self.lines))

    def kill(self) -> None:
        """End it: everything has been seen."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def timed(launcher: Launcher, folder: Path, to_the_end: bool) -> tuple[dict[str, float], list[str]]:
    """Seconds of each phase of one run up to the end of its first step, and what it printed."""
    marks = folder / "marks"
    run = Watched([*launcher.ours, "--run.dir", str(folder / "run")], marks)
    total = run.until(r"^step 1/")
    seen: dict[str, float] = {}
    for name, number in (line.split() for line in marks.read_text().splitlines()):
        seen.setdefault(name, float(number) - (0.0 if name.endswith("_cpu") else run.began))
    run.finish() if to_the_end else run.kill()
    found = {"total": total, "recipe": seen["recipe"], "imports and planning": seen["data"]}  # less the bare one's
    found |= {"data": seen["data_ready"] - seen["data"], "model": seen["model_ready"] - seen["data_ready"]}
    found |= {"prediction": seen["forward"] - seen["model_ready"], "first step": total - seen["forward"]}
    found["cpu"] = seen["forward_cpu"]
    return found, run.lines


def bare(launcher: Launcher, script: Path) -> dict[str, float]:
    """Seconds until torch and Fabric are imported and the ranks have met, without anything of ours: all, processor."""
    run = Watched([*launcher.bare, str(script), str(launcher.ranks)], script.with_suffix(".marks"))
    seconds = run.until("^READY")
    run.finish()
    cpu = next(float(line.split()[1]) for line in run.lines if line.startswith("READY"))
    return {"bare": seconds, "bare cpu": cpu}


def difference(folder: Path, reference: Path) -> float:
    """The largest difference of a weight, relative to the largest of its tensor."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(path / "run" / "model" / "model.safetensors") for path in (folder, reference))
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


def a_round(names: Sequence[str], work: Path, results: dict[str, Any], weights: dict[str, Path]) -> None:
    """Every launcher once, and its bare script; to the end where its ``weights`` are still to be compared."""
    script = work / "bare.py"
    script.write_text(BARE)
    before = os.getloadavg()[0]
    for name in names:
        launcher, entry = LAUNCHERS[name], results["launchers"].setdefault(name, {"seconds": []})
        folder = Path(tempfile.mkdtemp(dir=work))
        first = name not in weights and ("line" not in entry or name == "python")
        seconds, lines = timed(launcher, folder, to_the_end=first)
        seconds |= bare(launcher, script)
        entry["seconds"].append(seconds | {"load average": os.getloadavg()[0]})
        if first:
            entry |= {"command": launcher.shown, "ranks": launcher.ranks}
            weights[name] = folder
            entry["weights_difference"] = difference(folder, weights["python"])
            entry["line"] = next(line for line in lines if " rank" in line and " on 1 node" in line)
        print(f"{name}: {seconds['total']:.1f} s, bare {seconds['bare']:.1f} s, load {before:.1f}", flush=True)


def summary(entry: dict[str, Any]) -> dict[str, float]:
    """Medians over the rounds: of ours beyond the bare script in the same round, and of its parts."""
    rounds = entry["seconds"]
    median = {name: statistics.median(found[name] for found in rounds) for name in ("total", "bare", *PHASES[1:])}
    median["ours, processor"] = statistics.median(found["cpu"] - found["bare cpu"] for found in rounds)
    median["ours"] = statistics.median(found["total"] - found["bare"] for found in rounds)
    median[PHASES[0]] = statistics.median(found[PHASES[0]] - found["bare"] for found in rounds)
    return median


def show(results: dict[str, Any]) -> str:
    """The tables."""
    entries = results["launchers"]
    said = [[f"`{entry['command']}`", f"`{entry['line']}`", _exponent(entry)] for entry in entries.values()]
    header = ["launcher", "first step after", "torch and Fabric", "ours", "ours, processor", *PHASES]
    rows = []
    for name, entry in entries.items():
        median = summary(entry)
        rows.append([name, *(f"{median[key]:.1f}" for key in ("total", "bare", "ours", "ours, processor"))])
        rows[-1] += [f"{median[phase]:.2f}" for phase in PHASES]
    return table(["command", "what it prints", "difference of the weights"], said) + "\n\n" + table(header, rows)


def _exponent(entry: dict[str, Any]) -> str:
    found = entry.get("weights_difference")
    return "–" if found is None else f"{found:.0e}" if found else "0"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="launchers, with commas between; python is always among them")
    parser.add_argument("--add", action="store_true", help="add rounds to those that the file of results has")
    parser.add_argument("--out", default="launch")
    asked = parser.parse_args()
    names = asked.only.split(",") if asked.only else list(LAUNCHERS)
    results: dict[str, Any] = {"launchers": {}, "machines": []}
    kept = RESULTS / f"{asked.out}.json"
    if asked.add and kept.exists():
        results |= json.loads(kept.read_text())["results"]
    names = ["python", *(name for name in names if name != "python")]
    absent = [name for name in names if not LAUNCHERS[name].there()]
    record = Record(asked.out, {"rounds": asked.rounds, "only": asked.only})
    results["machines"].append(machine())
    weights: dict[str, Path] = {}
    with tempfile.TemporaryDirectory(prefix="launch-") as work:
        for _ in range(asked.rounds):
            a_round([name for name in names if name not in absent], Path(work), results, weights)
            record.write(results=results)
    medians = {name: summary(entry) for name, entry in results["launchers"].items()}
    record.write(complete=True, results=results, medians=medians)
    print(show(results))
    for name in absent:
        print(f"{name}: not on this machine")


if __name__ == "__main__":
    main()
