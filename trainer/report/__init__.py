"""What a person sees of a run: metrics, progress, loggers, curves and the summary."""
