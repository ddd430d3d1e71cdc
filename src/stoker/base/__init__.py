"""Small pure helpers that everything else stands on.

What does not belong here: anything that knows what a job, a worker or a block is. This package imports
nothing of ours.
"""
