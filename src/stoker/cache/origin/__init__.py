"""Where objects come from: one small port, and an adapter for each kind of remote storage.

What does not belong here: caching, single flight, retries. An origin does what it is told and counts it.
"""
