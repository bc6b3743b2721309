"""What ends a run before its time: found quickly, said with its cause, and without a process left behind."""
