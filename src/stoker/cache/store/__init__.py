"""Where blocks are kept: a small port, disk and memory behind it, and the shelf that drives the pure cores.

What does not belong here: origins, requests, who may read what.
"""
