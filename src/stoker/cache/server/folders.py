"""Pages of a list that have folders in place of what is in them, made of pages that have all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.origin.port import MARK
from stoker.cache.server.s3.listing import Lister
from stoker.errors import OriginError
from stoker.wire.cache_api import ObjectPage

AskPage = Callable[[str, str | None, int], Awaitable[ObjectPage]]
"""Of objects: prefix, the key after which it begins, and how many at most."""


async def folders_page(
    ask: AskPage, delimiter: str, prefix: str, after: str | None, limit: int
) -> ObjectPage:
    """At most `limit` entries right below a prefix. `after`: a key, or a folder, none of which is told of again.

    Raises what `ask` does, and OriginError where the origin leads nowhere.
    """
    lister = Lister(prefix, delimiter, (after or "").partition(MARK)[0], limit)
    age_s = 0.0
    while (asked := lister.ask) is not None:
        page = await ask(*asked)
        age_s = max(age_s, page.age_s)
        try:
            lister.feed(page.objects, page.after is None)
        except S3Refusal as error:
            raise OriginError(str(error)) from error
    found = lister.page()
    return ObjectPage(found.objects, found.last if found.is_truncated else None, age_s, found.common_prefixes)
