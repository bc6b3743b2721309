"""Disturbs tiny runs in every way that is known, and compares what comes of them with the promises.

The ranks of a run are forked from a process that has imported everything, so that a trial takes seconds; each runs the
command line of ``trainer fit`` in the environment that torchrun sets.
"""
