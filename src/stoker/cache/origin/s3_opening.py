"""What a bucket of S3 is opened with: by its URL and the AWS_* variables."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from stoker.cache.origin.s3_direct import DirectReads
from stoker.cache.origin.s3_signing import Credentials
from stoker.errors import ConfigError

PART_BYTES = 256 * 1024
"""Of a stream, but for the last: enough for the turns of the loop to be few, and soon there."""

# Query fields of an s3:// URL, what obstore calls them, and where the environment has them.
_FIELDS = {
    "endpoint": ("endpoint", ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")),
    "region": ("region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
    "access_key_id": ("access_key_id", ("AWS_ACCESS_KEY_ID",)),
    "secret_access_key": ("secret_access_key", ("AWS_SECRET_ACCESS_KEY",)),
    "session_token": ("session_token", ("AWS_SESSION_TOKEN",)),
}

MORE_THAN_PLAIN = (
    *("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"),
    *("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "AWS_S3_EXPRESS", "AWS_REQUEST_PAYER"),
)


class S3Options(NamedTuple):
    """What obstore opens a bucket with."""

    bucket: str
    prefix: str
    config: dict[str, Any]
    client: dict[str, Any]
    retry: dict[str, Any]


def s3_options(url: str, query: Mapping[str, str], environment: Mapping[str, str]) -> S3Options:
    """Of `s3://bucket/prefix`; `endpoint`, `region` and keys come from the query or from AWS_* variables.

    Without keys, requests are not signed. Raises ConfigError, also if obstore is not installed.
    """
    try:
        importlib.import_module("obstore.store")
    except ImportError as error:
        raise ConfigError(f"{url} needs the S3 extra: pip install 'stoker[s3]'") from error
    unknown = sorted(set(query) - set(_FIELDS))
    if unknown:
        raise ConfigError(f"{url}: unknown query field {unknown[0]!r}; there are {', '.join(_FIELDS)}")
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not bucket:
        raise ConfigError(f"{url!r} names no bucket: write s3://bucket/prefix")
    config: dict[str, Any] = {}
    for field, (name, variables) in _FIELDS.items():
        value = query.get(field) or next((environment[v] for v in variables if environment.get(v)), None)
        if value:
            config[name] = value
    config.setdefault("region", "us-east-1")
    if "access_key_id" not in config:
        config["skip_signature"] = True
    client = {"allow_http": config.get("endpoint", "").startswith("http://"), "timeout": "60s"}
    retry = _retry({"max_retries": 2, "retry_timeout": {"seconds": 20}})
    return S3Options(bucket, prefix, config, client, retry)


class OpenedS3(NamedTuple):
    """What a bucket is read with, and what it was opened with."""

    store: Any
    direct: DirectReads | None
    options: S3Options


def opened_s3(url: str, query: Mapping[str, str], environment: Mapping[str, str]) -> OpenedS3:
    """As `open_s3`, for whoever makes an origin of it. Raises ConfigError."""
    options = s3_options(url, query, environment)
    bucket, _, config, client, retry = options
    store_module = importlib.import_module("obstore.store")
    try:
        store = store_module.S3Store(bucket, config=config, client_options=client, retry_config=retry)
        return OpenedS3(store, _direct(url, bucket, config, environment), options)
    except Exception as error:
        raise ConfigError(f"cannot open {url}: {error}") from error


def _direct(
    url: str, bucket: str, config: Mapping[str, Any], environment: Mapping[str, str]
) -> DirectReads | None:
    """None where what obstore reads from the environment asks for more than plain requests. Raises ValueError for an
    endpoint that is none."""
    endpoint = config.get("endpoint", "")
    if not DirectReads.can_reach(endpoint) or any(environment.get(name) for name in MORE_THAN_PLAIN):
        return None
    credentials = credentials_of(config)
    if credentials is None and "access_key_id" in config:
        return None
    return DirectReads(url, endpoint, bucket, config["region"], credentials, PART_BYTES)


def credentials_of(config: Mapping[str, Any]) -> Credentials | None:
    """None where requests are not signed, or keys are not whole."""
    if "access_key_id" not in config or "secret_access_key" not in config:
        return None
    return Credentials(config["access_key_id"], config["secret_access_key"], config.get("session_token", ""))


def _retry(retry: dict[str, Any]) -> dict[str, Any]:
    from datetime import timedelta

    return {"max_retries": retry["max_retries"], "retry_timeout": timedelta(**retry["retry_timeout"])}
