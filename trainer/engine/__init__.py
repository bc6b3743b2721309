"""The exact training step, independent of any concrete model, any dataset and the planner."""
