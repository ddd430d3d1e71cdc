"""Questions to a database: connections of each process's own, retries, and our errors in place of SQLAlchemy's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.base.backoff import backoff_s
from stoker.base.rng import Rng
from stoker.errors import ConfigError, OriginError

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

T = TypeVar("T")
TRIES = 5
RETRY_FIRST_S, RETRY_LIMIT_S = 0.1, 5.0


class SqlSource:
    """A database at a SQLAlchemy URL; connects when first used, and anew after a fork.

    `engine_options` go to `sqlalchemy.create_engine`. Raises ConfigError for a URL that cannot be.
    """

    def __init__(
        self,
        url: str,
        engine_options: Mapping[str, Any] | None = None,
        *,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        needs_sqlalchemy()
        import sqlalchemy as sa

        try:
            self._url = sa.make_url(url)
        except sa.exc.ArgumentError as error:
            # Its message may hold a password: the URL is not repeated.
            raise ConfigError(
                "this is not a database's URL: write DIALECT://USER@HOST/NAME or sqlite:////PATH"
            ) from error
        self._options = dict(engine_options or {})
        self._wait = wait
        self._engines: dict[int, Engine] = {}
        self._rng = Rng(int.from_bytes(os.urandom(8), "big"))

    @property
    def where(self) -> str:
        """For messages: without the password."""
        return self._url.render_as_string(hide_password=True)

    def ask(self, question: Callable[[Connection], T]) -> T:
        """What `question` finds out over one connection. It is asked again where the database fails for a moment.

        Raises ConfigError if the driver is missing, OriginError when the last try failed.
        """
        import sqlalchemy as sa

        for attempt in range(1, TRIES + 1):
            try:
                with self._engine().connect() as connection:
                    return question(connection)
            except sa.exc.SQLAlchemyError as error:
                may_pass = _may_pass(error)
                if not may_pass or attempt == TRIES:
                    said = getattr(error, "orig", None) or error
                    tries = f" (after {attempt} tries)" if may_pass else ""
                    raise OriginError(
                        f"the database {self.where!r} failed{tries}: {type(said).__name__}: {said}"
                    ) from error
            self._wait(backoff_s(attempt, self._rng, first_s=RETRY_FIRST_S, limit_s=RETRY_LIMIT_S))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close this process's connections. The source may be used again."""
        engine = self._engines.pop(os.getpid(), None)
        if engine is not None:
            engine.dispose()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engines": {}}

    def _engine(self) -> Engine:
        """A fork keeps its parent's engine and never touches it: to let go of a connection is to write to it."""
        known = self._engines.get(os.getpid())
        if known is not None:
            return known
        import sqlalchemy as sa

        path = self._url.database
        if self._url.get_backend_name() == "sqlite" and path and _is_missing(path):
            raise ConfigError(f"there is no database {path!r}, and {self.where!r} would make an empty one")
        try:
            engine = sa.create_engine(self._url, **self._options)
        except (sa.exc.ArgumentError, ImportError) as error:
            raise ConfigError(
                f"{self.where!r} cannot be opened: {error}. Install the database's driver, or name another as in "
                "postgresql+psycopg://…"
            ) from error
        self._engines[os.getpid()] = engine
        return engine


def needs_sqlalchemy() -> None:
    """Raises ConfigError if it is not installed."""
    try:
        import sqlalchemy  # noqa: F401
    except ImportError as error:
        raise ConfigError("tables of databases need SQLAlchemy: pip install 'stoker[sql]'") from error


def _may_pass(error: Exception) -> bool:
    """Whether the same question may be answered later: the database is locked, restarts, or cannot be reached."""
    import sqlalchemy as sa

    if isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError | sa.exc.TimeoutError)


def _is_missing(path: str) -> bool:
    return path != ":memory:" and not path.startswith("file:") and not os.path.exists(path)
