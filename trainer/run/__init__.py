"""One run, where engine, memory, checkpoint, report, planner and faults meet."""
