"""Logging of gyrostat's own processes: one handler on the logger `gyrostat`, to stderr, as text or JSON.

Modules log with `logging.getLogger("gyrostat.…")` and pass `extra={"job": …, "generation": …, "step": …}` (or use
`logging.LoggerAdapter`); both formatters print the fields that a record has. The command line calls `configure`, which
sets $GYROSTAT_LOG and $GYROSTAT_LOG_FORMAT for the processes that are started later. Each of these calls
`configure_from_environment` once, when it starts.

GYROSTAT_LOG           the lowest level that is printed: DEBUG, INFO, WARNING (the default), ERROR
GYROSTAT_LOG_FORMAT    text (the default) or json
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from enum import StrEnum

from gyrostat.core.errors import UsageError

LEVEL, FORMAT = "GYROSTAT_LOG", "GYROSTAT_LOG_FORMAT"
FIELDS = ("job", "generation", "step")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class TextFormatter(logging.Formatter):
    """`05:20:11 INFO gyrostat.leader: generation begins (job mnist, generation 3, step 120)`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = ", ".join(f"{name} {value}" for name, value in fields_of(record).items())
        return super().formatMessage(record) + (f" ({fields})" if fields else "")


class JsonFormatter(logging.Formatter):
    """One JSON object per line, times in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields of `FIELDS` that the record has."""
    found = ((name, getattr(record, name, None)) for name in FIELDS)
    return {name: value for name, value in found if value is not None}


class _StderrHandler(logging.Handler):
    """Prints to the current `sys.stderr`: a live display replaces it and prints above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def is_json_record(line: str) -> bool:
    """Whether `JsonFormatter` wrote this line."""
    return line.startswith('{"time": "') and '"logger": "gyrostat' in line


def note(message: str, level: int = logging.INFO) -> None:
    """Print a line of gyrostat itself to stderr, whatever the level: `gyrostat: …`, or a JSON record in that format."""
    if os.environ.get(FORMAT) == LogFormat.JSON:
        line = JsonFormatter().format(logging.LogRecord("gyrostat", level, "", 0, message, None, None))
    else:
        line = f"gyrostat: {'error: ' if level >= logging.ERROR else ''}{message}"
    print(line, file=sys.stderr, flush=True)


def error(message: str) -> None:
    """`note` an error."""
    note(message, logging.ERROR)


def configure(verbosity: int = 0, format: LogFormat | None = None) -> LogFormat:
    """Apply `-v` (1: INFO, 2: DEBUG) and `--log-format` to this process and to those it starts.

    What is not given (0, None) is read from the environment. Returns the format in use.
    """
    if verbosity:
        os.environ[LEVEL] = "INFO" if verbosity == 1 else "DEBUG"
    if format is not None:
        os.environ[FORMAT] = format
    return configure_from_environment()


def configure_from_environment(environment: Mapping[str, str] = os.environ) -> LogFormat:
    """Set level and format of the logger `gyrostat`; returns the format. Idempotent."""
    level = (environment.get(LEVEL) or "WARNING").upper()
    if level not in _LEVELS:
        raise UsageError(f"${LEVEL} is one of {', '.join(_LEVELS)}; got {environment[LEVEL]!r}")
    format = environment.get(FORMAT) or LogFormat.TEXT
    if format not in list(LogFormat):
        raise UsageError(f"${FORMAT} is one of {', '.join(LogFormat)}; got {format!r}")
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if format == LogFormat.JSON else TextFormatter())
    logger = logging.getLogger("gyrostat")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False  # a script's own `logging.basicConfig` must not print them twice
    return LogFormat(format)
