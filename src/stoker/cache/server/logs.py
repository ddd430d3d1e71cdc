"""Log lines of a cache server, as text or as one JSON object each: with the id of the request that they are about."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from stoker.cache.server.inquiry import current_id
from stoker.cache.server.watch import access_log
from stoker.errors import ConfigError

TEXT, JSON_LINES = "text", "json"
FORMATS = (TEXT, JSON_LINES)
LEVELS = ("debug", "info", "warning", "error")
DEFAULT_LEVEL = "warning"


class JsonLine(logging.Formatter):
    """`time`, `level`, `logger`, `message`, `request_id` where there is one, and fields of the line's own."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_id():
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLine(logging.Formatter):
    """The same for people. A line break inside stays one line's."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = current_id()
        about = f" [{request_id}]" if request_id else ""
        message = _one_line(record.getMessage())
        fields = "".join(f" {name}={value}" for name, value in getattr(record, "fields", {}).items())
        error = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{_time_of(record)} {record.levelname.lower()}{about} {message}{_one_line(fields)}{error}"


def set_up_logs(log_format: str, level: str, *, logs_access: bool, stream: TextIO | None = None) -> None:
    """Have what this process logs written to standard error. The access log is written at any level. Raises
    ConfigError."""
    if log_format not in FORMATS:
        raise ConfigError(f"--log-format is {' or '.join(FORMATS)}, not {log_format!r}")
    if level not in LEVELS:
        raise ConfigError(f"--log-level is one of {', '.join(LEVELS)}, not {level!r}")
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLine() if log_format == JSON_LINES else TextLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # What libraries tell of each step is not asked for by any level.
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("stoker").setLevel(level.upper())
    access_log.setLevel(logging.INFO if logs_access else logging.NOTSET)
    # A reader of the log that is gone costs the lines, never the server.
    logging.raiseExceptions = False


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")
