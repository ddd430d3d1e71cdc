"""Checkpoints: taken into shared memory at a commit, written behind the training, read back from the nearest copy."""
