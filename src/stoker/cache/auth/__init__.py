"""Who is asking, and may they.

What does not belong here: routes, sockets.
"""
