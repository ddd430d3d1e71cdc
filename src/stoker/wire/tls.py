"""TLS towards cache servers: whom to trust, who we are, and what went wrong in words."""

from __future__ import annotations

import logging
import os
import ssl

from stoker.errors import ConfigError
from stoker.settings import ClientTlsFiles

log = logging.getLogger("stoker.cache")
_HINTS = (
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not trusted here: set STOKER_CACHE_CA to a file with the certificate of who signed it, and "
        "use a host name that stands in it",
    ),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS: write http:// instead of https://"),
    (
        "CERTIFICATE_REQUIRED",
        "it lets in only who shows a certificate: set STOKER_CACHE_CERT to ours, which its --tls-client-ca must have "
        "signed",
    ),
    (
        "ALERT_UNKNOWN_CA",
        "it does not trust our certificate (STOKER_CACHE_CERT), which its --tls-client-ca must have signed",
    ),
)


class ClientTls:
    """Contexts for connections to servers. The files are read again when one has changed; where they cannot be used
    then, what they held before is."""

    def __init__(self, files: ClientTlsFiles) -> None:
        self.files = files
        self._context: ssl.SSLContext | None = None
        self._marks: tuple[tuple[int, ...], ...] = ()

    def context(self) -> ssl.SSLContext:
        """For the next connection. Raises ConfigError where a file cannot be used."""
        marks = tuple(_mark(name) for name in self.files.names)
        if self._context is None or marks != self._marks:
            try:
                self._context = _context(self.files)
            except ConfigError as error:
                if self._context is None:
                    raise
                log.warning("what was changed is not taken, and what was there before is used: %s", error)
            self._marks = marks
        return self._context


def _context(files: ClientTlsFiles) -> ssl.SSLContext:
    if files.key and not files.certificate:
        raise ConfigError("STOKER_CACHE_CERT_KEY is of no use without STOKER_CACHE_CERT")
    try:
        context = ssl.create_default_context(cafile=files.ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
    except (OSError, ValueError) as error:
        raise ConfigError(f"STOKER_CACHE_CA={files.ca} holds no certificates: {error}") from error
    if files.certificate:
        try:
            # A password would be asked for at the terminal.
            context.load_cert_chain(files.certificate, files.key or None, password=lambda: "")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"STOKER_CACHE_CERT={files.certificate} and STOKER_CACHE_CERT_KEY={files.key or files.certificate} are "
                f"no certificate with its key: {error}"
            ) from error
    return context


def explained(error: Exception) -> str:
    """Why a connection failed, and where that is TLS, what to do."""
    said = str(error) or type(error).__name__
    return next(
        (f"{hint} ({said})" for reason, hint in _HINTS if reason in said.upper().replace(" ", "_")), said
    )


def _mark(name: str) -> tuple[int, ...]:
    try:
        found = os.stat(name)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
