"""`stoker demo`: a whole run on one machine, with a death in it. What does not belong here: anything that a run
of one's own needs; this is a user of `stoker run`'s parts like any other.
"""

from stoker.cli.demo.options import add_demo_parser

__all__ = ["add_demo_parser"]
