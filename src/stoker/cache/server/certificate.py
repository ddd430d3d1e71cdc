"""A server's certificate, which is read again when it was renewed."""

from __future__ import annotations

from pathlib import Path

from stoker._native import TlsContext
from stoker.base.clock import Clock
from stoker.base.marks import file_mark
from stoker.cache.server.settings import ServerTlsFiles
from stoker.errors import ConfigError

_LOOK_S = 1.0
"""So often the files are looked at."""


class Certificate:
    """Raises ConfigError where it cannot be used."""

    def __init__(self, files: ServerTlsFiles, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self._looked_at = clock.now()
        self._marks = self._look()
        self.context = self._read()
        self.problem: str | None = None
        """Why what the files hold now is not taken: the certificate before is used."""

    def look(self) -> bool:
        """Once in a while: whether there is another `context` for new connections."""
        now = self._clock.now()
        if now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        marks = self._look()
        if marks == self._marks:
            return False
        # What is wrong is not looked at again before it has changed.
        self._marks = marks
        try:
            self.context = self._read()
        except ConfigError as error:
            self.problem = f"the new certificate is not taken, and the one before is used: {error}"
            return False
        self.problem = None
        return True

    def _look(self) -> list[tuple[int, ...]]:
        return [file_mark(path) for path in self._files if isinstance(path, Path)]

    def _read(self) -> TlsContext:
        certificate, key, client_ca, is_client_required = self._files
        authorities = "" if client_ca is None else str(client_ca)
        try:
            return TlsContext(str(certificate), str(key), authorities, is_client_required)
        except RuntimeError as error:
            raise ConfigError(str(error)) from error
