"""Tokens: kept as hashes, recognised, revoked while somebody listens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gyrostat.cluster.api.tokens import Principal, TokenFile, new_token, read_tokens, write_tokens
from gyrostat.core.errors import UsageError

ALICE = Principal(tenant="alice", root="/srv/alice", vcs=("alice",))
OPERATOR = Principal(tenant="ops", operator=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_the_file_keeps_hashes_only(file: Path) -> None:
    secret, token = new_token(ALICE)
    write_tokens(file, (token,))
    assert secret.startswith("gyr_")
    assert len(secret) >= 43
    assert secret not in file.read_text()
    assert json.loads(file.read_text())["tokens"][0]["sha256"] == hashlib.sha256(secret.encode()).hexdigest()
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_tokens(file) == (token,)


def test_whose_a_token_is(file: Path) -> None:
    alice, first = new_token(ALICE)
    ops, second = new_token(OPERATOR)
    write_tokens(file, (first, second))
    token_file = TokenFile(file)
    assert token_file.recognise(alice) == ALICE
    assert token_file.recognise(ops) == OPERATOR
    for wrong in ("", alice[:-1], alice + "x", first.sha256, first.id, "ü"):
        assert token_file.recognise(wrong) is None


def test_a_revoked_token_opens_nothing(file: Path) -> None:
    alice, first = new_token(ALICE)
    ops, second = new_token(OPERATOR)
    write_tokens(file, (first, second))
    token_file = TokenFile(file)
    write_tokens(file, (second,))
    assert token_file.recognise(alice) is None
    assert token_file.recognise(ops) == OPERATOR


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_text("{")])
def test_a_file_that_cannot_be_read_lets_nobody_in(file: Path, spoil: Callable[[Path], object]) -> None:
    ops, token = new_token(OPERATOR)
    write_tokens(file, (token,))
    token_file = TokenFile(file)
    spoil(file)
    assert token_file.recognise(ops) is None
    write_tokens(file, (token,))
    assert token_file.recognise(ops) == OPERATOR


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a token file"),
        ("{}", "missing required field"),
        ('{"format": "other", "tokens": []}', "its format is 'other'"),
        ('{"format": "gyrostat-tokens-1", "tokens": []}', "has no tokens"),
        ('{"format": "gyrostat-tokens-1", "tokens": [{"id": "a", "sha256": "x"}]}', "is not a token file"),
    ],
)
def test_a_book_without_sound_tokens_is_refused(file: Path, content: str, message: str) -> None:
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(UsageError, match=message):
        TokenFile(file)


def test_a_file_that_others_may_write_is_refused(file: Path) -> None:
    _, token = new_token(OPERATOR)
    write_tokens(file, (token,))
    os.chmod(file, 0o620)
    with pytest.raises(UsageError, match=r"others may write .* \(mode 620\): chmod 600"):
        TokenFile(file)


def test_a_missing_file_is_an_error(file: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        TokenFile(file)
