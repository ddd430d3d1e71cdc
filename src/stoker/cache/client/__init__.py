"""Read through a cache server.

What does not belong here: anything of the server's but its messages.
"""
