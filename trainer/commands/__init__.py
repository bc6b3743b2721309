"""The subcommands of ``trainer``, one a file: each takes the words after its name. ``trainer.cli`` has their table."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

TRUST = "trust-recipe"  # the switch that lets a YAML file name Python code


class OwnFlags(NamedTuple):
    """What a command takes besides the flags of a recipe, each with its help: those with a value (of which ``several``
    take all words up to the next flag, and one the ``words`` that no flag takes), and switches."""

    valued: Mapping[str, str] = MappingProxyType({})
    switches: Mapping[str, str] = MappingProxyType({})
    several: Sequence[str] = ()
    words: str | None = None
    about: str = ""  # what the command does, for a help page of its own


NONE = OwnFlags()
EVERY = OwnFlags(  # the flags of every command that takes a recipe
    {"config": "read settings from a YAML file; flags override it"},
    {"print_config": "print the recipe as YAML", TRUST: "execute the .py file that a recipe.yaml names"},
)
