"""Record formats: how records lie in objects.

What does not belong here: where the bytes come from (the cache's), and in which order records are read (`data.order`).
"""
