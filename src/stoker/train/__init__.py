"""What a training script imports: the elastic loop, its state, gradient sync, checkpoints.

`member` is pure. What does not belong here: anything that an agent or the master needs; they run without
PyTorch.
"""
