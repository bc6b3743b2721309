"""``python -m benchmarks.chaos``."""

import sys

from trainer.errors import RecipeError, RunError

from .command import chaos, parser

try:
    chaos(**vars(parser().parse_args()))
except (RecipeError, RunError) as error:
    sys.exit(f"chaos: error: {error}")
