"""``trainer runs``: a table of the runs below a folder, and what two of them differ in."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainer.errors import RecipeError, require
from trainer.settings import did_you_mean
from trainer.system.files import open_regular, read_object
from trainer.system.lock import NAME as LOCK
from trainer.system.processes import ProcessId
from trainer.system.text import as_text, columns, escaped

USAGE = """\
usage: trainer runs [DIR ...] [--where KEY=VALUE] [--sort COLUMN] [--json]
       trainer runs --compare RUN_DIR RUN_DIR

A table of the runs in and below each DIR (by default runs), the latest last.

--where KEY=VALUE  only runs with that value in a column, or with that setting, such as optim.lr=1e-3; may be repeated
--sort COLUMN      by a column, such as test_accuracy; -COLUMN for the greatest first
--json             all columns and settings, as a list
--compare          the settings and figures in which two runs differ
"""
MOST_BYTES = 4_000_000
"""Of a JSON file of a run, and of the end of its metrics.csv that is read."""

LONGEST = 60
"""Letters of a setting that --compare shows."""

SHOWN = ("run", "status", "step", "figure", "val_loss", "memory_gb", "seconds", "date")
WORDS = ("run", "status", "figure", "date")


def runs(argv: Sequence[str]) -> None:
    """``trainer runs``."""
    from trainer.commands import OwnFlags
    from trainer.commands.flags import scan

    known = OwnFlags({"where": "", "filter": "", "sort": "", "compare": ""}, {"json": ""}, several=("compare",))
    folders, flags = scan(argv, known)
    if ("help", None) in flags:
        print(USAGE, end="")
        return
    names = [*known.valued, *known.switches]
    for name, _ in flags:
        require(
            name in names,
            f"runs: unknown flag --{name}{did_you_mean(name, names, dashes='--')}: see trainer runs --help",
        )
    pair = [Path(text) for name, text in flags if name == "compare" and text]
    if pair:
        require(len(pair) == 2, f"--compare takes two run directories, and was given {len(pair)}")
        for path in pair:
            require(_is_run(path), f"--compare: {path} is no run directory: it has no recipe.yaml")
        print(compared(*map(row_of, pair)))
        return
    found = [row_of(path, folder) for folder in map(Path, folders or ["runs"]) for path in _below(folder)]
    where = [text for name, text in flags if name in ("where", "filter") and text]
    rows = sorted(found, key=lambda row: row["date"])
    hidden = ("settings", "faults", "figure")
    keys = list(dict.fromkeys(key for row in rows for key in (*row, *row["settings"]) if key not in hidden))
    for text in where:
        key, equals, value = text.partition("=")
        require(bool(equals), f"--where={text!r} must be KEY=VALUE, such as status=finished")
        _require_key("--where", key, keys)
        rows = [row for row in rows if _same(_of(row, key), value)]
    for text in (text for name, text in flags if name == "sort" and text):
        key = text.removeprefix("-")
        _require_key("--sort", key, keys)
        known_of = [row for row in rows if _of(row, key) is not None]
        known_of.sort(key=partial(_order, key), reverse=text != key)
        rows = known_of + [row for row in rows if _of(row, key) is None]
    if ("json", None) in flags:
        print(json.dumps(rows, indent=1, ensure_ascii=True))
        return
    if not rows:
        where_from = ", ".join(folders or ["runs"])
        print(f"no runs in {escaped(where_from)}" if not found else f"none of {len(found)} runs fits --where")
        return
    print(table(rows))


def _require_key(flag: str, key: str, keys: Sequence[str]) -> None:
    hint = did_you_mean(key, keys) or f"; columns are {', '.join(name for name in keys if '.' not in name)}"
    require(key in keys or not keys, f"{flag}={key!r} is no column and no setting of these runs{hint}")


def _is_run(path: Path) -> bool:
    return os.path.isfile(path / "recipe.yaml")


def _below(folder: Path) -> list[Path]:
    """The run directories in and below ``folder``; of what is within one of them only itself."""
    require(os.path.isdir(folder), f"runs: there is no folder {str(folder)!r}: give the one that your runs are in")
    found = []
    for place, inside, files in os.walk(folder):
        if "recipe.yaml" in files and {"status.json", "summary.json", "metrics.csv", "model"} & {*inside, *files}:
            found.append(Path(place))
            inside.clear()
        inside[:] = sorted(name for name in inside if not name.startswith("."))
    return found


def row_of(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """What is known of a run: figures, and its ``settings``. What cannot be read is in its ``faults``."""
    faults: list[str] = []

    def content(name: str) -> dict[str, Any]:
        found = read_object(path / name, MOST_BYTES)
        if not found and (path / name).exists():
            faults.append(f"{name} is no JSON object")
        return found

    summary, status = content("summary.json"), content("status.json")
    memory, metrics = _mapping(summary.get("memory")), _mapping(summary.get("metrics"))
    figures = {
        f"{split}_{name}": value
        for split, of_split in metrics.items()
        for name, value in _mapping(of_split).items()
        if value is not None
    }
    history = _last_of(path / "metrics.csv")
    state = str(status.get("status") or summary.get("status") or "unknown")
    settings = _settings(path / "recipe.yaml", faults)
    told = [(key, value) for key, value in figures.items() if not key.endswith("_loss")] or list(figures.items())
    newest = max(
        (file.stat().st_mtime for file in (path / "status.json", path / "recipe.yaml") if file.exists()), default=0
    )
    name = os.path.relpath(path, folder) if folder and path != folder else str(path)
    return {
        "run": name,
        "status": "broken" if faults else _alive(path, state),
        "step": summary.get("steps", history.get("step")),
        "figure": f"{told[0][0].replace('_', ' ', 1)} {_percent(*told[0])}" if told else None,
        "val_loss": history.get("val_loss", figures.get("val_loss")),
        "memory_gb": memory.get("reserved_gb") or memory.get("host_peak_gb"),
        "seconds": summary.get("seconds"),
        "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(newest)),
        **{key: value for key, value in figures.items() if key != "val_loss"},
        "settings": settings,
        "faults": faults,
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _alive(path: Path, state: str) -> str:
    """``died`` for a run that says it is running, on this machine, and whose process is gone."""
    if state != "running":
        return state
    owner = read_object(path / LOCK, MOST_BYTES)
    try:
        process = ProcessId.from_dict({name: owner.get(name) for name in ProcessId.__dataclass_fields__})
    except ValueError:
        return "died" if not (path / LOCK).exists() else state
    return "died" if process.is_here() and process.state() == "gone" else state


def _settings(path: Path, faults: list[str]) -> dict[str, Any]:
    """Every setting in recipe.yaml by its dotted name."""
    from trainer.commands.flags import load_yaml_file

    flat: dict[str, Any] = {}
    try:
        waiting = [("", load_yaml_file(path))]
    except RecipeError as error:
        faults.append(str(error).replace(f"{path}", path.name))
        return flat
    while waiting:
        prefix, tree = waiting.pop(0)
        for key, value in tree.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict) and not prefix:
                waiting.append((f"{name}.", value))
            else:
                flat[name] = value
    return flat


def _last_of(path: Path) -> dict[str, float]:
    """The last figure of every column of ``metrics.csv``, as far as its end tells."""
    last: dict[str, float] = {}
    try:
        with open_regular(path) as file:
            header = file.readline(MOST_BYTES).decode(errors="replace")
            at = file.tell()
            file.seek(max(at, os.fstat(file.fileno()).st_size - MOST_BYTES))
            whole = file.tell() == at
            lines = file.read(MOST_BYTES).decode(errors="replace").splitlines()[0 if whole else 1 :]
    except OSError:
        return last
    for row in csv.DictReader(io.StringIO("\n".join([header.strip(), *lines]))):
        for name, cell in row.items():
            try:
                last[str(name)] = float(cell or "")
            except (ValueError, TypeError):  # noqa: PERF203
                continue
    return last | ({"step": int(last["step"])} if "step" in last and last["step"] == last["step"] else {})


def _of(row: Mapping[str, Any], key: str) -> Any:
    """A column, or a setting."""
    return row.get(key, row["settings"].get(key))


def _order(key: str, row: Mapping[str, Any]) -> tuple[bool, Any]:
    value = _of(row, key)
    return (False, float(value)) if isinstance(value, int | float) else (True, str(value))


def _same(value: Any, text: str) -> bool:
    """Whether a value is what a person wrote: 1e-3 is 0.001, and true is True."""
    try:
        return not isinstance(value, bool) and float(value) == float(text)
    except (TypeError, ValueError):
        return json.dumps(value) == text or str(value) == text


def _percent(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{100 * value:.2f} %" if name.endswith("accuracy") else f"{value:.4f}"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "memory_gb":
        return f"{value:.2f} GB" if isinstance(value, int | float) else str(value)
    if name == "seconds" and isinstance(value, int | float):
        hours, rest = divmod(int(value), 3600)
        return f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return escaped(f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else value)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each run, then what is wrong with those that are broken."""
    heads = ["run", "status", "step", "figure", "val loss", "memory", "time", "date"]
    cells = [[_cell(name, row[name]) for name in SHOWN] for row in rows]
    broken = [f"{row['run']}: {'; '.join(row['faults'])}" for row in rows if row["faults"]]
    return "\n".join([columns(heads, cells, WORDS), *map(escaped, broken)])


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """A line for each setting, then for each figure, in which two runs differ."""
    heads, cells = ["", escaped(first["run"]), escaped(second["run"])], []
    for key in dict.fromkeys([*first["settings"], *second["settings"]]):
        both = [as_text(row["settings"][key]) if key in row["settings"] else "-" for row in (first, second)]
        if both[0] != both[1]:
            cells.append([escaped(text if len(text) <= LONGEST else f"{text[:LONGEST]}…") for text in (key, *both)])
    for key in dict.fromkeys([*first, *second]):
        both = [_cell(key, row.get(key)) or "-" for row in (first, second)]
        if both[0] != both[1] and key not in ("run", "settings", "figure", "faults"):
            cells.append([escaped(key), *both])
    return columns(heads, cells, heads) if cells else "the two runs have the same settings and figures"
