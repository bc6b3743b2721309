"""Many runs: sweeps, the search for a learning rate, the ladder of techniques, and a table of runs."""
