"""The subcommands of ``trainer``, one per file; each takes the words after its name. ``trainer.cli`` lists them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

TRUST = "trust-recipe"  # the switch that allows a YAML file to name Python code


class OwnFlags(NamedTuple):
    """The flags of a command in addition to those of the recipe, with their help texts.

    ``valued`` flags take a value; those in ``several`` take all words up to the next flag; ``words`` is the flag that
    takes words without a flag."""

    valued: Mapping[str, str] = MappingProxyType({})
    switches: Mapping[str, str] = MappingProxyType({})
    several: Sequence[str] = ()
    words: str | None = None
    about: str = ""  # description of the command, for a short help page


NONE = OwnFlags()
EVERY = OwnFlags(  # the flags of every command that takes a recipe
    {"config": "read settings from a YAML file; flags override it"},
    {"print_config": "print the recipe as YAML", TRUST: "execute the .py file that a recipe.yaml names"},
)
