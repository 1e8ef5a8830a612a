"""Tokens: which tenant a request belongs to, and what it may do.

A token is 32 random bytes, shown once when it is made; the file has only its SHA-256 (a slower hash is unnecessary for what
cannot be guessed). An operator's token may do everything; a tenant's token sees and changes that tenant's jobs only, submits to
the virtual clusters it names, and runs scripts below one directory. The file is read again when it changes, so a token can be
revoked while the cluster runs; if it cannot be read, all requests are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
import threading
from pathlib import Path
from typing import Annotated

import msgspec

from gyrostat.core.errors import UsageError
from gyrostat.core.files import write_atomically

FORMAT = "gyrostat-tokens-1"
_PREFIX = "gyr_"
logger = logging.getLogger(__name__)


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request."""

    tenant: str
    operator: bool = False
    """May see and change all jobs, reserve devices, and shut the cluster down."""
    root: str | None = None
    """Workdirs and scripts must lie below; None: anywhere."""
    modules: bool = False
    """May run modules (python -m) although it has a root: they are found wherever Python finds them."""
    vcs: tuple[str, ...] | None = None
    """Virtual clusters that it may submit to; None: any."""


class Token(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the file."""

    id: str
    """Identifies the token without revealing it."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    principal: Principal


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    tokens: tuple[Token, ...]


def new_token(principal: Principal) -> tuple[str, Token]:
    """The secret, which is shown once, and its entry in the file."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    return secret, Token(id=secrets.token_hex(4), sha256=_digest(secret), principal=principal)


def read_tokens(path: Path) -> tuple[Token, ...]:
    """All tokens of a file; refuses one that others may write."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read()
    except OSError as error:
        raise UsageError(
            f"the token file {path} cannot be read: {error.strerror}; make one with `gyrostat token add`"
        ) from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"others may write the token file {path} (mode {stat.S_IMODE(mode):03o}): chmod 600 {path}"
        )
    try:
        found = msgspec.json.decode(content, type=_File)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is not a token file ({FORMAT}): {error}") from error
    if found.format != FORMAT:
        raise UsageError(f"{path} is not a token file ({FORMAT}): its format is {found.format!r}")
    return found.tokens


def write_tokens(path: Path, tokens: tuple[Token, ...]) -> None:
    """Atomic: readers see the old file or the new one. Readable by its owner only."""
    content = msgspec.json.format(msgspec.json.encode(_File(format=FORMAT, tokens=tokens)), indent=1)
    try:
        write_atomically(path, content + b"\n")
    except OSError as error:
        raise UsageError(f"the token file {path} cannot be written: {error.strerror}") from error


class TokenFile:
    """The tokens in force: those of the file as it is now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._tokens = read_tokens(path)
        if not self._tokens:
            raise UsageError(
                f"the token file {path} has no tokens, so every request would be refused; add one with `gyrostat token add`"
            )

    def recognise(self, secret: str) -> Principal | None:
        """The principal of a token. Takes the same time whichever matches, and if none does."""
        digest, found = _digest(secret), None
        for token in self._current():
            if hmac.compare_digest(token.sha256, digest):
                found = token.principal
        return found

    def _current(self) -> tuple[Token, ...]:
        with self._lock:
            stamp = self._stamp()
            if stamp != self._seen:
                try:
                    self._tokens = read_tokens(self._path)
                except UsageError as error:
                    logger.error("all requests are refused until this is repaired: %s", error)
                    self._tokens = ()
                self._seen = stamp
            return self._tokens

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_ctime_ns, found.st_size


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
