"""Both ends of a connection prove that they know the job's token, without sending it.

    accepting end               connecting end
    CHALLENGE (random bytes) →
                              ← HELLO (who it is, random bytes, proof)
    WELCOME (proof)          →

Each proof is an HMAC over both random values, so that neither a recorded handshake nor one's own is accepted. Before this is
done, frames of at most 1 KiB are read.
"""

from __future__ import annotations

import hmac
import os
from enum import StrEnum
from typing import Annotated

import msgspec

from gyrostat.ps.wire.frames import MalformedFrame

MOST_BYTES = 1024
_NONCE = 32

_Bytes = Annotated[bytes, msgspec.Meta(min_length=_NONCE, max_length=_NONCE)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class PeerRole(StrEnum):
    """What the connecting end is."""

    WORKER = "worker"
    SERVER = "server"


class PeerIdentity(msgspec.Struct, frozen=True):
    role: PeerRole
    name: _Name


class Challenge(msgspec.Struct, frozen=True):
    nonce: _Bytes


class PeerHello(msgspec.Struct, frozen=True):
    peer: PeerIdentity
    nonce: _Bytes
    proof: _Bytes


class PeerWelcome(msgspec.Struct, frozen=True):
    proof: _Bytes


def new_token() -> bytes:
    return os.urandom(_NONCE)


def new_challenge() -> Challenge:
    return Challenge(os.urandom(_NONCE))


def hello(token: bytes, peer: PeerIdentity, challenge: Challenge) -> PeerHello:
    """The answer of the connecting end."""
    nonce = os.urandom(_NONCE)
    return PeerHello(peer, nonce, _proof(token, b"connect", challenge.nonce, nonce, peer))


def welcome(token: bytes, challenge: Challenge, answer: PeerHello) -> PeerWelcome:
    """The answer of the accepting end. Raises `MalformedFrame` if the other end does not know the token."""
    expected = _proof(token, b"connect", challenge.nonce, answer.nonce, answer.peer)
    if not hmac.compare_digest(expected, answer.proof):
        raise MalformedFrame(f"{answer.peer.role} {answer.peer.name!r} does not know the token of this job")
    return PeerWelcome(_proof(token, b"accept", challenge.nonce, answer.nonce, answer.peer))


def check_welcome(token: bytes, challenge: Challenge, mine: PeerHello, answer: PeerWelcome) -> None:
    """Raises `MalformedFrame` if the accepting end does not know the token."""
    if not hmac.compare_digest(
        _proof(token, b"accept", challenge.nonce, mine.nonce, mine.peer), answer.proof
    ):
        raise MalformedFrame("the process at this address does not know the token of this job")


def _proof(token: bytes, direction: bytes, challenge: bytes, nonce: bytes, peer: PeerIdentity) -> bytes:
    text = direction + challenge + nonce + msgspec.msgpack.encode(peer)
    return hmac.digest(token, text, "sha256")
