"""Names for nodes, workers and jobs, and the check every outside name goes through."""

from __future__ import annotations

import re
import secrets

_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,62}$")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it is safe in paths and URLs.

    Raises ValueError: lower-case letters, digits, `.`, `_`, `-`; 1-63 characters; starts with a letter or digit.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"{name!r} is not a {kind} name: use 1-63 of a-z, 0-9, '.', '_', '-', starting with a letter or digit"
        )
    return name


def new_id(prefix: str) -> str:
    """A short unguessable id: `node-3f9a1c2b`."""
    return f"{prefix}-{secrets.token_hex(4)}"


def new_token() -> str:
    """A fresh bearer token (256 bits)."""
    return secrets.token_urlsafe(32)
