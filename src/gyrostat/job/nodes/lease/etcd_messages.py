"""etcd's v3 messages as its JSON gateway writes them: only the fields that are read here.

In JSON, bytes are base64, 64-bit numbers are strings, and zero or empty fields are omitted; msgspec handles all three
(`decode`). Requests are plain dictionaries.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

M = TypeVar("M")


class Header(msgspec.Struct, frozen=True):
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class EtcdEmpty(msgspec.Struct, frozen=True):
    """A response without content."""


class Range(msgspec.Struct, frozen=True):
    header: Header
    kvs: tuple[KeyValue, ...] = ()


class TxnPart(msgspec.Struct, frozen=True):
    response_range: Range | None = None


class Txn(msgspec.Struct, frozen=True):
    header: Header
    succeeded: bool = False
    responses: tuple[TxnPart, ...] = ()

    def found(self, part: int) -> KeyValue | None:
        """The result of the range request at this position of the executed branch."""
        answer = self.responses[part].response_range
        return answer.kvs[0] if answer is not None and answer.kvs else None


class Granted(msgspec.Struct, frozen=True):
    seconds: int = msgspec.field(name="TTL", default=0)
    """0: the lease does not exist."""


class KeptAlive(msgspec.Struct, frozen=True):
    result: Granted


class Authenticated(msgspec.Struct, frozen=True):
    token: str


class EtcdEvent(msgspec.Struct, frozen=True):
    kv: KeyValue
    type: str = "PUT"


class Watched(msgspec.Struct, frozen=True):
    header: Header
    events: tuple[EtcdEvent, ...] = ()
    canceled: bool = False


class EtcdFailure(msgspec.Struct, frozen=True):
    error: str = "no reason given"
    code: int = 2


class Streamed(msgspec.Struct, frozen=True):
    """One line of a watch."""

    result: Watched | None = None
    error: object = None


def decode(data: bytes, kind: type[M]) -> M:
    return msgspec.json.decode(data, type=kind, strict=False)
