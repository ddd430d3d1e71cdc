"""The data path, top to bottom: origin -> store -> server -> client.

A read-through cache of immutable blocks. What does not belong here: anything that knows what a training job,
a worker or a generation is. The cache and the job meet in `stoker.data` and in messages.
"""
