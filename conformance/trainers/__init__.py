"""Adapters: one file per trainer, used as its documentation shows."""
