"""Tools for many runs: sweeps, the learning-rate finder, the ladder of techniques, and a table of runs."""
