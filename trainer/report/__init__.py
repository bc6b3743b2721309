"""The output of a run for the user: metrics, progress, loggers, curves and the summary."""
