"""Units of memory: decimal, as makers of devices count."""

GB = 1e9
MB = 1e6
