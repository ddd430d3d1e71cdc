"""How records lie in objects: finding them, taking them apart, putting them together. All of it is pure.

What does not belong here: where the bytes come from.
"""
