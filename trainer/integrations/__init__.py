"""Parts of this package for use in other training loops and trainers."""
