"""Use of a trained model after a run: prediction, text generation and export."""
