"""Lists of S3 by its own API: every key as it is, which obstore's lists do not have (`folder/` is `folder` there)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import NamedTuple
from urllib.parse import unquote_plus

from stoker.cache.origin import s3_xml
from stoker.cache.origin.content import version_of_tag
from stoker.cache.origin.port import MARK, Entries
from stoker.cache.origin.s3_calls import S3Calls
from stoker.errors import OriginError, StokerError
from stoker.wire.cache_api import ObjectInfo

_PAGE = 1000
_HIGHEST = chr(0x10FFFF)


class _Page(NamedTuple):
    objects: list[ObjectInfo]
    is_truncated: bool
    token: str
    folders: list[str]


async def listed(
    calls: S3Calls, root: str, prefix: str, after: str | None
) -> AsyncGenerator[list[ObjectInfo], None]:
    """The objects below `root` whose keys begin with a prefix, those after a key, a page at a time, in the server's
    order. Raises OriginError."""
    asked = {
        "list-type": "2",
        "prefix": root + prefix,
        "max-keys": str(_PAGE),
        "encoding-type": "url",
    }
    query = asked if after is None else {**asked, "start-after": root + after}
    while True:
        page = await _asked(calls, query, root)
        if page.objects:
            yield page.objects
        if not page.is_truncated:
            return
        if page.token:
            query = {**asked, "continuation-token": page.token}
        elif page.objects:
            query = {**asked, "start-after": root + page.objects[-1].key}
        else:
            raise OriginError(f"{calls.url} says that its list goes on, and not where")


async def listed_folder(
    calls: S3Calls, root: str, prefix: str, after: str | None, limit: int
) -> Entries | None:
    """At most `limit` entries right below a prefix, as `ListsFolders` has them: by the server's own tokens, so that
    nothing is lost where it lists in another order than that of the keys. None: it does not say where its list goes on.
    Raises OriginError."""
    query = {"list-type": "2", "prefix": root + prefix, "delimiter": "/", "encoding-type": "url"}
    last, _, token = (after or "").partition(MARK)
    objects: list[ObjectInfo] = []
    folders: list[str] = []
    while (left := limit - len(objects) - len(folders)) > 0:
        place = {"continuation-token": token} if token else {"start-after": root + _behind(last, prefix)}
        page = await _asked(
            calls, {**query, **(place if last else {}), "max-keys": str(min(left, _PAGE))}, root
        )
        if page.is_truncated and not page.token:
            return None
        objects += page.objects
        folders += page.folders
        last = max([last, *(info.key for info in page.objects), *page.folders])
        token = page.token
        if not page.is_truncated:
            return Entries(objects, sorted(folders), None)
    objects.sort(key=lambda info: info.key)
    return Entries(objects, sorted(folders), f"{last}{MARK}{token}")


def _behind(last: str, prefix: str) -> str:
    """Behind a folder is what comes after all that can be in it."""
    return last + _HIGHEST if last.endswith("/") and last != prefix else last


async def _asked(calls: S3Calls, query: dict[str, str], root: str) -> _Page:
    """A page. Raises OriginError."""
    try:
        answer = await calls.call("GET", "", query, {}, may_repeat=True)
    except OriginError:
        raise
    except StokerError as error:
        raise OriginError(f"cannot list {calls.url}: {error}") from error
    # A page of a thousand keys takes a while to read.
    return await asyncio.to_thread(_page_of, answer.body, root)


def _page_of(body: bytes, root: str) -> _Page:
    page = s3_xml.parse(body, "ListBucketResult")
    decode = unquote_plus if page.text("EncodingType") == "url" else str
    objects = []
    for one in page.all("Contents"):
        said = one.texts()
        path = decode(said.get("Key", ""))
        key = path.removeprefix(root)
        if not path.startswith(root) or not key:
            continue
        size_bytes = s3_xml.number_of(said.get("Size", ""))
        modified_s = s3_xml.seconds_of(said.get("LastModified", ""))
        version = version_of_tag(said.get("ETag", "")) or f"{size_bytes}-{modified_s}"
        objects.append(ObjectInfo(key, size_bytes, version, modified_s, None))
    paths = [decode(one.text("Prefix")) for one in page.all("CommonPrefixes")]
    folders = sorted(path.removeprefix(root) for path in paths if path.startswith(root) and path != root)
    token = page.text("NextContinuationToken")
    return _Page(objects, page.text("IsTruncated") == "true", token, folders)
