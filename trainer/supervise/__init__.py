"""``trainer run``: a run that is started again when it dies. Standard library only, so that it starts at once."""
