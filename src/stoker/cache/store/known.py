"""What is known of an object."""

from __future__ import annotations

from typing import NamedTuple

from stoker._native import Found


class Known(NamedTuple):
    """A version of an object. `bucket` is its number in the index, and `tag` stands for the version there: 0, nothing
    can be held of it. `checked_s` is when the origin last said so, seconds since 1970; 0: it must be asked.
    `attributes`: what is told of the object besides, see `attributes.py`."""

    bucket: int
    key: str
    version: str
    size_bytes: int
    tag: int
    checked_s: int
    is_absent: bool = False
    attributes: str = ""


def is_held(found: Found, block: int) -> bool:
    """Whether a block is here of what was found, which is with its blocks."""
    if not found.container:
        return False
    return found.block(block) is not None if found.is_large else block == 0
