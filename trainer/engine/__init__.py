"""What a training step is. Knows no model, no dataset and no planner."""
