"""Detects failures that end a run early, reports their cause, and leaves no process behind."""
