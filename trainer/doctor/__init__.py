"""``trainer doctor``: what would go wrong with a run, found before it starts, each finding with its fix."""
