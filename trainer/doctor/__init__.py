"""``trainer doctor``: checks machine, data and model before a run; every problem comes with its fix."""
