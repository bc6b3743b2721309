"""The subcommands of ``trainer``, one per file; each takes the words after its name. ``trainer.cli`` lists them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

TRUST_RECIPE = "trust-recipe"  # the switch that allows a YAML file to name Python code


class CommandFlags(NamedTuple):
    """The flags of a command in addition to those of the recipe, with their help texts.

    ``valued`` flags take a value; those in ``multi_valued`` take all words up to the next flag; ``positional`` is the
    flag that takes words without a flag."""

    valued: Mapping[str, str] = MappingProxyType({})
    switches: Mapping[str, str] = MappingProxyType({})
    multi_valued: Sequence[str] = ()
    positional: str | None = None
    description: str = ""  # description of the command, for a short help page


NO_FLAGS = CommandFlags()
RECIPE_FLAGS = CommandFlags(  # the flags of every command that takes a recipe
    {"config": "read settings from a YAML file; flags override it"},
    {"print_config": "print the recipe as YAML", TRUST_RECIPE: "execute the .py file that a recipe.yaml names"},
)
