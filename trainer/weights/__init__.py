"""Weights: the blocks of a module, the files that its tensors are in, and reading them safely."""
