"""Which ranks take part in a run, how they find each other, and how they are started."""
