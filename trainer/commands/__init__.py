"""The subcommands of ``trainer``, one a file: each takes the words after its name. ``trainer.cli`` has their table."""

TRUST = "trust-recipe"
"""The switch that lets a YAML file lead to Python code."""
