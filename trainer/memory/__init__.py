"""The memory-saving techniques, one per file."""
