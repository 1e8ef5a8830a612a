"""Whole files are replaced, or left as they were."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.files import OWNER_ONLY, READABLE, read_text, write_atomically


@pytest.mark.parametrize(("mode", "durable"), [(OWNER_ONLY, True), (READABLE, False)])
def test_a_file_is_replaced(tmp_path: Path, mode: int, durable: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_atomically(path, b"new", durable=durable, mode=mode)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == mode
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    """A directory cannot be replaced by a file: the rename fails after the content has been written."""
    path = tmp_path / "directory"
    (path / "content").mkdir(parents=True)
    with pytest.raises(OSError) as error:
        write_atomically(path, b"new")
    assert error.value.errno in (errno.EISDIR, errno.ENOTEMPTY)
    assert os.listdir(tmp_path) == ["directory"]
    assert os.listdir(path) == ["content"]


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"^the token file .*token is not UTF-8 text: "):
        read_text(tmp_path / "token", "the token file")
    with pytest.raises(UsageError, match=r"^/nosuch cannot be read: No such file or directory$"):
        read_text(Path("/nosuch"))
