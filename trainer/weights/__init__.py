"""Weights: the blocks of a module, safe reading of weight files, and NF4."""
