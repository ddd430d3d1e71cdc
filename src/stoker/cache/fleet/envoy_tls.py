"""How an Envoy speaks TLS, as data (Envoy's v3 configuration): to clients, and to the servers behind it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.errors import ConfigError

Json = dict[str, Any]
_NAME = "envoy.transport_sockets.tls"
_KIND = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3"
_NOBODYS_HASH = "00" * 32
SECRET_TYPE_URL = f"{_KIND}.Secret"
_CA = "ca:"
"""What the name of a secret begins with that is a file of authorities; its path follows."""


def secrets(names: Sequence[str]) -> list[Json]:
    """What an Envoy is told that asks for these: files of its own, which it reads again whenever others take their
    place. Its own configuration cannot say so, only somebody whom it asks. Raises ConfigError for another name."""
    for name in names:
        if not name.startswith(f"{_CA}/"):
            raise ConfigError(f"there is no secret {name[:200]!r}: ask for {_CA}/PATH")
    return [
        {
            "@type": SECRET_TYPE_URL,
            "name": name,
            "validation_context": {"trusted_ca": {"filename": name.removeprefix(_CA)}},
        }
        for name in sorted(set(names))
    ]


def tls_of_listener(certificate: str, key: str) -> Json:
    """With this certificate, to whoever asks."""
    common = {"alpn_protocols": ["h2", "http/1.1"], "tls_certificates": [_certificate(certificate, key)]}
    return {
        "name": _NAME,
        "typed_config": {"@type": f"{_KIND}.DownstreamTlsContext", "common_tls_context": common},
    }


def tls_to_servers(ca: str, name: str, certificate: str, key: str, source: Json | None) -> Json:
    """To those whose certificates were signed by who is in the file `ca`, for that name, or for the host name of each;
    they are shown a certificate, if there is one. `source`: who tells `secrets`; None: the file is read once.

    Without `ca` nobody is believed: else requests, and tokens with them, would go there in the open.
    """
    common: Json = {"alpn_protocols": ["http/1.1"]}
    if ca and source is not None:
        common["validation_context_sds_secret_config"] = {"name": f"{_CA}{ca}", "sds_config": source}
    elif ca:
        common["validation_context"] = {"trusted_ca": {"filename": ca}}
    else:
        common["validation_context"] = {"verify_certificate_hash": [_NOBODYS_HASH]}
    if certificate:
        common["tls_certificates"] = [_certificate(certificate, key)]
    said: Json = {"sni": name} if name else {"auto_host_sni": True}
    return {
        "name": _NAME,
        "typed_config": {
            "@type": f"{_KIND}.UpstreamTlsContext",
            **said,
            "auto_sni_san_validation": bool(ca),
            "common_tls_context": common,
        },
    }


def _certificate(certificate: str, key: str) -> Json:
    return {"certificate_chain": {"filename": certificate}, "private_key": {"filename": key}}
