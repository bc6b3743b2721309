"""Detects the ranks of a run, starts them if no launcher did, and connects them."""
