"""The event path: event → machine → decision → effect.

`machine`, `membership`, `relaunch` and `events` are pure: they get `now` as an argument, touch no socket and no
clock. `master` is the shell that feeds them. What does not belong here: anything about the cache, and anything
that runs on a worker's node.
"""
