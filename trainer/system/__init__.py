"""Files, texts and processes of this machine: no torch, no run, no recipe."""
