"""The memory-saving stack: one technique a file."""
