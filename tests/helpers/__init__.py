"""What the tests share: problems with known answers, pools of ranks, runs, files that would do harm."""

LONG = 300.0
"""Seconds that what a test waits for may take: it ends in a few, and in a hundred on a machine with much else to do."""
