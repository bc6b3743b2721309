"""The files that a run leaves on disk: written atomically, as JSON and safetensors, never pickled."""
