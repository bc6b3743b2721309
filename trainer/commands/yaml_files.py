"""YAML files of settings, read as plain values: no tag constructs an object, and no file is larger than it looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from trainer.errors import RecipeError
from trainer.system.files import read_regular

MOST_BYTES = 1_000_000
"""Of a file: read at some 100 kB a second."""

MOST_NODES = 100_000
"""In a file, aliases counted as often as they are used: a few lines of them can stand for billions."""


def load_yaml_file(path: Path) -> dict[Any, Any]:
    """The settings in a YAML file, nested as they are written.

    Raises:
        RecipeError: naming the file, when it is missing, not YAML, gives a key twice, or is not a mapping.
    """
    try:
        tree = load_yaml(read_regular(path, MOST_BYTES).decode())
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file") from None
    except RecipeError as error:
        raise RecipeError(f"{path} {error}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(f"{path} line {line}: not valid YAML: {error.problem}") from error
    except RecursionError:
        raise RecipeError(f"{path} is nested too deeply") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, TypeError, yaml.YAMLError) as error:  # PyYAML checks no !!int 'x'
        raise RecipeError(f"{path} cannot be read: {error}") from error
    if not isinstance(tree or {}, dict):
        raise RecipeError(f"{path} must hold a mapping of settings, not a {type(tree).__name__}")
    return tree or {}


def load_yaml(text: str) -> Any:
    """What jsonargparse makes of YAML, with its safe loader.

    Raises:
        RecipeError: for a duplicate key, of which jsonargparse would silently keep the last, for a key that is no word,
            and for aliases that come to more than :data:`MOST_NODES` entries, or to themselves.
    """
    nodes = [yaml.compose(text, yaml.SafeLoader)]
    seen = 0
    while nodes:
        node = nodes.pop()
        seen += 1
        if seen > MOST_NODES:
            raise RecipeError(f"comes to more than {MOST_NODES:,} entries: too many, or aliases of aliases")
        lines: dict[str, int] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"line {line}: a key must be a word or a number")
            if key.value in lines:
                raise RecipeError(f"line {line}: duplicate key {key.value}, first given on line {lines[key.value]}")
            lines[key.value] = line
            nodes.append(value)
        nodes += node.value if isinstance(node, yaml.SequenceNode) else ()
    return get_loader("yaml")(text)
