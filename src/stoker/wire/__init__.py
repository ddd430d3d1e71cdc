"""Typed messages between processes, their version, and the plumbing that carries them.

Messages are msgspec structs in MessagePack; nothing here pickles or evaluates. What does not belong here: any
decision about what a message means.
"""
