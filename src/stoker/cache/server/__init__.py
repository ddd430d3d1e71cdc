"""One cache server: one event loop, one folder.

The front parses HTTP, checks the token and answers hits; everything else goes through a small port to the
back. What does not belong here: placement, other servers, clients.
"""
