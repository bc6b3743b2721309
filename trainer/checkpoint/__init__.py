"""What a run leaves on disk: written whole or not at all, as JSON and safetensors, never pickled."""
