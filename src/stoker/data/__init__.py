"""Datasets and the formats of their records, the order in which a run reads them, and the loader for PyTorch.

`order`, `audit` and `framing` are pure. What does not belong here: where bytes come from (the cache's), and how workers
agree on a world (the job's).
"""
