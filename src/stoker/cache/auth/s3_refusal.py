"""How the parts of the S3 dialect refuse: by one of S3's error codes."""

from __future__ import annotations

from stoker.errors import StokerError


class S3Refusal(StokerError):
    """A request that is not done. `code` is S3's (`server/s3/errors.py` knows its status), the text is for people;
    `more` is what the code's XML says beside it, as (element, text)."""

    def __init__(self, code: str, message: str, more: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.more = more
