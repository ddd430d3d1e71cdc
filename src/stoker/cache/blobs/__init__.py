"""Blobs: objects that were pushed, and that no origin has. What is here is pure: their versions, their names, and who
may say which version is the newest. How they are held and handed on is in `cache/server/blobs/`."""
