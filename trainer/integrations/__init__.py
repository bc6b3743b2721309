"""For training loops and trainers that are not ours."""
