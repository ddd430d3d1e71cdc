"""The one Stoker process on a node: starts workers, watches them, speaks for them to the master.

`core` is pure; the rest is shell. What does not belong here: decisions about the world (the master's), and
anything that needs PyTorch (the workers').
"""
