"""``trainer runs``: a table of the runs below a folder, or the differences between two runs."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import CorruptCheckpointError, verify_text_file
from trainer.errors import RecipeError, require
from trainer.system.error_reports import describe_error
from trainer.system.files import open_regular, read_json_object
from trainer.system.lock import NAME as LOCK
from trainer.system.names import did_you_mean
from trainer.system.processes import ProcessId
from trainer.system.text import align_columns, as_text, escaped, format_metric

MAX_JSON_BYTES = 4_000_000  # size limit of a run's JSON files, and of the part read from the end of its metrics.csv
MAX_VALUE_CHARS = 60  # maximum characters of a setting in --compare
SHOWN = ("run", "status", "step", "metric", "val_loss", "memory_gb", "seconds", "date")
WORDS = ("run", "status", "metric", "date")


def runs(argv: Sequence[str]) -> None:
    from trainer.commands import CommandFlags
    from trainer.commands.flags import split_argv

    valued = dict.fromkeys(("where", "filter", "sort", "compare"), "")
    known = CommandFlags(valued, {"json": ""}, multi_valued=("compare",))
    folders, flags = split_argv(argv, known)
    if ("help", None) in flags:
        print(Path(__file__).with_name("list_runs_usage.txt").read_text(encoding="utf-8"), end="")
        return
    names = [*known.valued, *known.switches]
    for name, _ in flags:
        hint = did_you_mean(name, names, dashes="--")
        require(name in names, f"runs: unknown flag --{name}{hint}: see trainer runs --help")
    pair = [Path(text) for name, text in flags if name == "compare" and text]
    if pair:
        require(len(pair) == 2, f"--compare takes two run directories, not {len(pair)}")
        for path in pair:
            require(os.path.isfile(path / "recipe.yaml"), f"--compare: {path} is not a run directory: no recipe.yaml")
        print(diff_runs(*map(read_run, pair)))
        return
    paths = [(path, folder) for folder in map(Path, folders or ["runs"]) for path in _below(folder)]
    where = [text for name, text in flags if name in ("where", "filter") and text]
    order = [text for name, text in flags if name == "sort" and text]
    found = [read_run(*path, with_settings=("json", None) in flags) for path in paths]
    asked = {text.partition("=")[0] for text in where} | {text.removeprefix("-") for text in order}
    if not asked <= {key for row in found for key in row}:  # settings are asked for: reading them takes longer
        found = [read_run(*path) for path in paths]
    rows = sorted(found, key=lambda row: row["date"])
    hidden = ("settings", "faults", "metric")
    keys = list(dict.fromkeys(key for row in rows for key in (*row, *row["settings"]) if key not in hidden))
    for text in where:
        key, equals, value = text.partition("=")
        require(bool(equals), f"--where={text!r} must be KEY=VALUE, such as status=finished")
        _require_key("--where", key, keys)
        rows = [row for row in rows if _same(_of(row, key), value)]
    for text in order:
        key = text.removeprefix("-")
        _require_key("--sort", key, keys)
        known_of = [row for row in rows if _of(row, key) is not None]
        known_of.sort(key=partial(_order, key), reverse=text != key)
        rows = known_of + [row for row in rows if _of(row, key) is None]
    if ("json", None) in flags:
        print(json.dumps(rows, indent=1, ensure_ascii=True))
        return
    where_from = ", ".join(folders or ["runs"])
    none = f"none of the {len(found)} runs matches --where" if found else f"no runs in {escaped(where_from)}"
    print(table(rows) if rows else none)


def _require_key(flag: str, key: str, keys: Sequence[str]) -> None:
    hint = did_you_mean(key, keys) or f"; columns are {', '.join(name for name in keys if '.' not in name)}"
    require(key in keys or not keys, f"{flag}={key!r} is not a column or setting of these runs{hint}")


def _below(folder: Path) -> list[Path]:
    require(os.path.isdir(folder), f"runs: no folder {str(folder)!r}: give the folder of your runs")
    found = []
    for place, inside, files in os.walk(folder):
        if "recipe.yaml" in files and {"status.json", "summary.json", "metrics.csv", "model"} & {*inside, *files}:
            found.append(Path(place))
            inside.clear()
        inside[:] = sorted(name for name in inside if not name.startswith("."))
    return found


def read_run(path: Path, folder: Path | None = None, with_settings: bool = True) -> dict[str, Any]:
    """Return the columns of a run, its ``settings``, and ``faults``: problems with its files.

    Without ``with_settings``, recipe.yaml is parsed only if it does not match its hash: otherwise it is intact.
    """
    faults: list[str] = []

    def content(name: str) -> dict[str, Any]:
        found = read_json_object(path / name, MAX_JSON_BYTES)
        if not found and (path / name).exists():
            faults.append(f"{name} is not a JSON object")
        return found

    summary, status = content("summary.json"), content("status.json")
    memory, metrics = _mapping(summary.get("memory")), _mapping(summary.get("metrics"))
    history = _last_of(path / "metrics.csv", faults)
    numbers = {"step": summary.get("steps", history.get("step")), "seconds": summary.get("seconds")}
    numbers["memory_gb"] = memory.get("reserved_gb") or memory.get("host_peak_gb")
    numbers |= {f"{split}_{name}": value for split, found in metrics.items() for name, value in _mapping(found).items()}
    wrong = [name for name, value in numbers.items() if value is not None and not _is_finite(value)]
    faults += [f"{name} is not a finite number" for name in wrong]
    known = {name: value for name, value in numbers.items() if value is not None and name not in wrong}
    scores = {name: value for name, value in known.items() if name not in ("step", "memory_gb", "seconds")}
    val_loss = history.get("val_loss", known.get("val_loss"))
    shown = [(key, value) for key, value in scores.items() if not key.endswith("_loss")] or list(scores.items())
    recipe, is_whole = path / "recipe.yaml", False
    with suppress(CorruptCheckpointError):
        is_whole = verify_text_file(recipe) is None
    settings = _settings(recipe, faults) if with_settings or not is_whole else {}
    newest = max((file.stat().st_mtime for file in (path / "status.json", recipe) if file.exists()), default=0)
    return {
        "run": os.path.relpath(path, folder) if folder and path != folder else str(path),
        "status": "broken" if faults else _alive(path, str(status.get("status") or summary.get("status") or "unknown")),
        "step": known.get("step"),
        "metric": f"{shown[0][0].replace('_', ' ', 1)} {format_metric(*shown[0])}" if shown else None,
        "val_loss": val_loss if _is_finite(val_loss) else None,
        "memory_gb": known.get("memory_gb"),
        "seconds": known.get("seconds"),
        "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(newest)),
        **{name: value for name, value in scores.items() if name != "val_loss"},
        "settings": settings,
        "faults": faults,
    }


def _is_finite(value: Any) -> bool:
    """Return whether it is a number that a float can hold: Python's json also reads NaN and huge integers."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _alive(path: Path, state: str) -> str:
    """Return ``died`` for a run that is marked as running on this machine, but whose process is gone."""
    if state != "running":
        return state
    owner = read_json_object(path / LOCK, MAX_JSON_BYTES)
    try:
        process = ProcessId.from_dict({name: owner.get(name) for name in ProcessId.__dataclass_fields__})
    except ValueError:
        return "died" if not (path / LOCK).exists() else state
    return "died" if process.is_visible() and process.state() == "gone" else state


def _settings(path: Path, faults: list[str]) -> dict[str, Any]:
    from trainer.commands.flags import load_yaml_file

    try:
        tree = load_yaml_file(path)
    except RecipeError as error:
        faults.append(str(error).replace(f"{path}", path.name))
        return {}
    flat: dict[str, Any] = {}
    for key, value in _plain(tree).items():
        flat |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _plain(value: Any) -> Any:
    """Convert to JSON types: YAML also has dates, sets, bytes, NaN, and integers too large for a float."""
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return sorted(map(_plain, value), key=str) if isinstance(value, set) else list(map(_plain, value))
    if isinstance(value, int) and not _is_finite(value):
        return hex(value)  # Python cannot print more than 4,300 decimal digits
    return value if value is None or isinstance(value, str) or _is_finite(value) else str(value)


def _last_of(path: Path, faults: list[str]) -> dict[str, float]:
    last: dict[str, float] = {}
    try:
        with open_regular(path) as file:
            header = file.readline(MAX_JSON_BYTES).decode(errors="replace").strip()
            file.seek(max(file.tell() - 1, os.fstat(file.fileno()).st_size - MAX_JSON_BYTES, 0))
            lines = file.read(MAX_JSON_BYTES).decode(errors="replace").splitlines()[1:]  # the first line is incomplete
        names = next(csv.reader([header], strict=True), ["step"])
        require("step" in names, "the column step is missing")
        kinds: dict[str, type[float]] = {"step": int} | ({"val_loss": float} if "val_loss" in names else {})
        for row in csv.reader(lines, strict=True):
            cells = dict(zip(names, row, strict=False))
            last |= {name: kind(cells[name]) for name, kind in kinds.items() if cells.get(name)}
    except OSError:
        return {}
    except (csv.Error, ValueError) as error:
        faults.append(f"{path.name}: {describe_error(error)}")
    return last


def _of(row: Mapping[str, Any], key: str) -> Any:
    return row.get(key, row["settings"].get(key))


def _order(key: str, row: Mapping[str, Any]) -> tuple[bool, Any]:
    value = _of(row, key)
    return (False, float(value)) if isinstance(value, int | float) else (True, str(value))


def _same(value: Any, text: str) -> bool:
    try:
        return not isinstance(value, bool) and float(value) == float(text)
    except (TypeError, ValueError):
        return json.dumps(value) == text or str(value) == text


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "memory_gb":
        return f"{value:.2f} GB"
    if name == "seconds":
        hours, rest = divmod(int(value), 3600)
        return f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return escaped(f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else value)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a line per run, then the problems of broken runs."""
    heads = ["run", "status", "step", "metric", "val loss", "memory", "time", "date"]
    cells = [[_cell(name, row[name]) for name in SHOWN] for row in rows]
    broken = [f"{row['run']}: {'; '.join(row['faults'])}" for row in rows if row["faults"]]
    return "\n".join([align_columns(heads, cells, WORDS), *map(escaped, broken)])


def diff_runs(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Format a line per setting, then per metric, in which two runs differ."""
    heads, cells = ["", escaped(first["run"]), escaped(second["run"])], []
    for key in dict.fromkeys([*first["settings"], *second["settings"]]):
        both = [as_text(row["settings"][key]) if key in row["settings"] else "-" for row in (first, second)]
        if both[0] != both[1]:
            shown = (text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…" for text in (key, *both))
            cells.append(list(map(escaped, shown)))
    for key in dict.fromkeys([*first, *second]):
        both = [_cell(key, row.get(key)) or "-" for row in (first, second)]
        if both[0] != both[1] and key not in ("run", "settings", "metric", "faults"):
            cells.append([escaped(key), *both])
    return align_columns(heads, cells, heads) if cells else "the two runs have the same settings and metrics"
