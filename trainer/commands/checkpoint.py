"""``trainer checkpoint list | verify | export``: inspect, check and export checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.folder import CheckpointFolder, is_checkpoint
from trainer.checkpoint.manifest import CorruptCheckpointError, find_corruption, read_manifest, verify_text_file
from trainer.commands import TRUST_RECIPE, CommandFlags
from trainer.commands.flags import split_argv
from trainer.errors import require
from trainer.system.files import read_json_object, room_in, staged_folder, write_atomic
from trainer.system.text import escaped, format_bytes

ACTIONS = ("list", "verify", "export")
CHOICES = ("best", "last")  # flags of export that choose a checkpoint of a run
RESULTS = {"recipe.yaml": verify_text_file, "model": manifests.verify_folder}  # checks of other results of a run


def checkpoint(argv: Sequence[str]) -> None:
    """Run ``trainer checkpoint``."""
    positionals, flags = split_argv(argv, CommandFlags({}, {"best": "", "last": ""}))
    if ("help", None) in flags or not positionals:
        print(Path(__file__).with_name("checkpoint_usage.txt").read_text(encoding="utf-8"), end="")
        return
    action, *rest = positionals
    unknown = [name for name, _ in flags if action != "export" or name not in ("out", *CHOICES, TRUST_RECIPE)]
    require(action in ACTIONS, f"checkpoint {action}: no such action: use one of {', '.join(ACTIONS)}")
    require(not unknown, f"checkpoint {action}: unknown flag --{'/--'.join(unknown)}: see trainer checkpoint --help")
    require(len(rest) == 1, f"checkpoint {action} takes one DIR: see trainer checkpoint --help")
    path = Path(rest[0])
    if action == "list":
        list_checkpoints(find(path))
    elif action == "verify":
        checks = {} if is_checkpoint(path) else RESULTS
        results = {path / name: check for name, check in checks.items() if (path / name).exists()}
        verify_checkpoints(CheckpointFolder(path / "checkpoints").newest_first() if results else find(path), results)
    else:
        out = next((text for name, text in flags if name == "out"), None)
        paths = choose(path, [name for name, _ in flags if name in CHOICES])
        export_checkpoint(paths, Path(out) if out else None, trusted=(TRUST_RECIPE, None) in flags)


def choose(path: Path, asked: Sequence[str]) -> list[Path]:
    """Return the checkpoints of ``path`` to export, the first choice first; ``asked`` has the given ``CHOICES``."""
    require(len(asked) <= 1, "checkpoint export: give --best or --last, not both")
    paths = find(path)
    best = None if "last" in asked else best_checkpoint(paths)
    missing = "no evaluation has chosen a best checkpoint (run.best, a validation set)"
    require("best" not in asked or best is not None, f"{path}: {missing}: leave out --best")
    if best is None:
        return paths
    return [best] if asked else [best, *(other for other in paths if other != best)]  # a damaged best one is skipped


def find(path: Path) -> list[Path]:
    """Return the checkpoint ``path``, or all checkpoints of a run directory or a folder, newest first."""
    require(path.is_dir(), f"{path}: no such directory")
    if is_checkpoint(path):
        return [path]
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = CheckpointFolder(folder).newest_first()
    require(bool(found), f"{folder} has no checkpoint")
    return found


def best_checkpoint(newest_first: Sequence[Path]) -> Path | None:
    """Return the best checkpoint so far, as recorded in the newest one; ``None`` if not recorded, or removed."""
    best = read_json_object(newest_first[0] / manifests.STATE, manifests.MAX_JSON_BYTES).get("best")
    step = best.get("step") if isinstance(best, dict) else None
    name = manifests.folder_name(step) if type(step) is int and step else None
    return next((path for path in newest_first if path.name == name), None)


def list_checkpoints(paths: Sequence[Path]) -> None:
    """Print a line per checkpoint, from the manifests only."""
    best = best_checkpoint(paths)
    for path in paths:
        try:
            print(escaped(f"{path}  {_described(read_manifest(path))}{' · best' * (path == best)}"))
        except CorruptCheckpointError as error:  # noqa: PERF203
            if os.path.lexists(path):  # otherwise its run, still alive, has removed it
                print(escaped(f"{path}  CORRUPT: {error}"))


def _described(manifest: manifests.Manifest) -> str:
    step = f"step {manifest.step:,} (epoch {manifest.epoch}, {manifest.step_in_epoch:,} steps in)"
    size = format_bytes(sum(entry["bytes"] for entry in manifest.files.values()))
    ranks = f"{manifest.world_size} rank{'s' * (manifest.world_size > 1)}"
    metrics = [f"{name} {value:.4f}" for name, value in (manifest.figures or {}).items()]
    return " · ".join([step, size, ranks, *metrics, manifest.created])


def verify_checkpoints(paths: Sequence[Path], results: Mapping[Path, Callable[[Path], str | None]]) -> None:
    """Check and print every checkpoint and each of the ``results``; raise CorruptCheckpointError at the end."""
    corrupt = damaged = 0
    for path in paths:
        problem = find_corruption(path)
        if problem is not None and not os.path.lexists(path):
            print(f"{path}  removed by its run in the meantime")
            continue
        corrupt += problem is not None
        print(escaped(f"{path}  {'ok' if problem is None else f'CORRUPT: {problem}'}"))
    for path, check in results.items():
        try:
            print(escaped(f"{path}  {check(path) or 'ok'}"))
        except CorruptCheckpointError as error:  # noqa: PERF203
            damaged += 1
            print(escaped(f"{path}  CORRUPT: {error}"))
    if corrupt:
        raise CorruptCheckpointError(f"{corrupt} of {len(paths)} checkpoint(s) are corrupt")
    if damaged:
        changed = f"{damaged} of {len(results)} results of the run"
        raise CorruptCheckpointError(f"{changed} have changed since they were written")


def export_checkpoint(paths: Sequence[Path], out: Path | None, *, trusted: bool = False) -> None:
    """Write the model of the first valid checkpoint of ``paths`` to ``out``; ``trusted`` as for ``load_recipe``."""
    for path in paths:
        problem = find_corruption(path)
        if problem is None:
            break
        if os.path.lexists(path):
            print(escaped(f"warning: {problem}"))
    else:
        raise CorruptCheckpointError(f"none of the {len(paths)} checkpoint(s) in {paths[0].parent} is intact")
    run_dir = path.absolute().parent.parent
    stored, target = run_dir / "recipe.yaml", out or run_dir / "model"
    why = f"{run_dir} has no recipe.yaml, which defines the model of {path.name}"
    require(stored.is_file(), f"{why}: export from inside its run directory")
    require(not target.exists(), f"{target} exists: remove it or give another folder with --out")
    if unsealed := verify_text_file(stored):
        print(f"warning: {unsealed}")
    from trainer.checkpoint.export import save_model
    from trainer.commands.recipes import load_recipe
    from trainer.report.model_card import TrainingFacts, build_model_card
    from trainer.run.resume import ValidCheckpoint, load_whole_model

    recipe, _ = load_recipe(str(stored), trusted=trusted)
    manifest = read_manifest(path)
    module = load_whole_model(ValidCheckpoint(path, manifest), recipe.model)
    metrics, data = dict(manifest.figures or {}), {"class": type(recipe.data).__name__, "fingerprint": manifest.dataset}
    facts = {"status": f"checkpoint of step {manifest.step:,}", "plan": manifest.plan, "saved": manifest.created}
    trained = TrainingFacts({**facts, **metrics}, {}, data, manifest.versions)  # the metrics' split is not recorded
    with room_in(target.absolute().parent, "give another folder with --out"), staged_folder(target) as folder:
        save_model(recipe.model, module, folder)
        write_atomic(folder / "README.md", build_model_card(recipe, run_dir, trained))
    print(escaped(f"exported the model of {path.name} to {target}"))
