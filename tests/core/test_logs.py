"""Levels, formats and fields of log records, and how children inherit them."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gyrostat.core import logs
from gyrostat.core.errors import UsageError
from gyrostat.core.logs import LogFormat

_LOG = logging.getLogger("gyrostat.test")


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (logs.LEVEL, logs.FORMAT):
        monkeypatch.setenv(name, "")
    logger = logging.getLogger("gyrostat")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


def test_the_default_is_warnings_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.configure() is LogFormat.TEXT
    _LOG.info("not printed")
    _LOG.warning("slow")
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING gyrostat.test: slow\n", capsys.readouterr().err)


def test_fields_follow_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(1)
    _LOG.info("generation %s begins", 3, extra={"job": "mnist", "generation": 3, "step": 0})
    logging.LoggerAdapter(_LOG, {"job": "mnist"}).info("fence")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("INFO gyrostat.test: generation 3 begins (job mnist, generation 3, step 0)")
    assert lines[1].endswith("INFO gyrostat.test: fence (job mnist)")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.configure(2, LogFormat.JSON) is LogFormat.JSON
    _LOG.debug("fence at %d", 12, extra={"job": "mnist", "step": 12})
    try:
        raise ValueError("bad")
    except ValueError:
        _LOG.exception("failed")
    first, second = capsys.readouterr().err.splitlines()
    assert logs.is_json_record(first)
    entry = json.loads(first)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("time"))
    assert entry == {
        "level": "DEBUG",
        "logger": "gyrostat.test",
        "process": os.getpid(),
        "message": "fence at 12",
        "job": "mnist",
        "step": 12,
    }
    assert json.loads(second)["exception"].endswith("ValueError: bad")
    assert not logs.is_json_record('{"time": "of a script"}')


def test_children_inherit_level_and_format() -> None:
    logs.configure(1, LogFormat.JSON)
    child = (
        "import logging; from gyrostat.core import logs; logs.configure_from_environment();"
        "logging.getLogger('gyrostat.child').info('started')"
    )
    printed = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stderr
    assert json.loads(printed)["message"] == "started"


def test_a_script_that_configures_logging_prints_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_from_environment({logs.LEVEL: "error"})
    logs.configure_from_environment({logs.LEVEL: "info"})
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        _LOG.info("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err.count("once") == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({logs.LEVEL: "loud"}, r"\$GYROSTAT_LOG is one of DEBUG, INFO, WARNING, ERROR; got 'loud'"),
        ({logs.FORMAT: "xml"}, r"\$GYROSTAT_LOG_FORMAT is one of text, json; got 'xml'"),
    ],
)
def test_bad_values(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        logs.configure_from_environment(environment)


def test_notes_are_printed_at_every_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    logs.note("resumed")
    logs.error("no room")
    assert capsys.readouterr().err == "gyrostat: resumed\ngyrostat: error: no room\n"
    logs.configure(format=LogFormat.JSON)
    logs.note("resumed")
    logs.error("no room")
    lines = capsys.readouterr().err.splitlines()
    assert all(map(logs.is_json_record, lines))
    entries = [json.loads(line) for line in lines]
    assert [(entry["level"], entry["message"]) for entry in entries] == [
        ("INFO", "resumed"),
        ("ERROR", "no room"),
    ]
