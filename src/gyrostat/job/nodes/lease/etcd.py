"""A lease store in etcd 3.4 or later, for agents on any number of machines.

    PREFIX/leader     exists while an agent leads, attached to an etcd lease; its create revision is the token
    PREFIX/data/KEY   values, each written by a transaction that requires the leader key with that token

etcd's revisions only increase, and all changes have one order, so tokens increase and views compare by revision. An etcd lease
never expires earlier than granted, counted from before the request; it may expire half a second late, and later while etcd
itself has no leader. Restoring etcd from an old backup resets revisions: agents notice that, and end the job (`election`).
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable
from math import ceil

import msgspec

from gyrostat.core.errors import LeaseError, StoreRefused, StoreUnreachable
from gyrostat.job.nodes.lease.base import Lease, LeaseView, check_key, check_value, clock, deposed
from gyrostat.job.nodes.lease.etcd_gateway import Gateway, ResponseStream, Servers
from gyrostat.job.nodes.lease.etcd_messages import EtcdEmpty, Granted, KeptAlive, KeyValue, Range, Txn, decode

_OPEN_TIMEOUT_S = 10.0
_RECONNECT_S = (0.05, 1.0)
_PUT_ATTEMPTS = 5


class _Leader(msgspec.Struct, frozen=True):
    """The value of the leader key."""

    format: int
    holder: str


class EtcdStore:
    """Implements `base.LeaseStore`."""

    def __init__(self, servers: Servers, prefix: str) -> None:
        self._gateway = Gateway(servers)
        self._leader = f"{prefix}/leader".encode()
        self._data = f"{prefix}/data/"
        self._guard = threading.Lock()
        self._grants: dict[int, int] = {}
        """Token to etcd's lease id, for the leases that were acquired here."""
        self._written: dict[bytes, int] = {}
        """The last known revision of each value."""

    def check(self) -> None:
        """Check that etcd answers, with a longer timeout than later since many agents start at once, and that this user may
        read and write here: etcd checks the permissions of both branches of a transaction."""
        gateway = Gateway(self._gateway.servers, timeout=_OPEN_TIMEOUT_S)
        with contextlib.closing(gateway):
            answer = gateway.call(
                "/v3/kv/txn",
                {
                    "compare": [{"key": self._leader, "target": "VERSION", "version": -1}],
                    "success": [
                        {"request_put": {"key": self._leader, "value": b""}},
                        {"request_put": {"key": self._path_of("key"), "value": b""}},
                    ],
                    "failure": [{"request_range": {"key": self._leader}}],
                },
                Txn,
            )
        _view(answer.found(0), answer.header.revision)

    def acquire(self, holder: str, ttl: float) -> Lease | LeaseView:
        asked, grant = clock(), secrets.randbits(62) + 1
        granted = self._grant(grant, ceil(ttl))
        value = msgspec.json.encode(_Leader(1, holder))
        answer = self._gateway.call(
            "/v3/kv/txn",
            {
                "compare": [_created(self._leader, 0)],
                "success": [{"request_put": {"key": self._leader, "value": value, "lease": grant}}],
                "failure": [{"request_range": {"key": self._leader}}],
            },
            Txn,
        )
        found = None if answer.succeeded else answer.found(0)
        if found is not None and found.lease != grant:
            return _view(found, answer.header.revision)  # The unused grant expires by itself.
        # Found with our own grant: an earlier attempt succeeded, and its reply was lost.
        token = answer.header.revision if found is None else found.create_revision
        with self._guard:
            self._grants[token] = grant
        return Lease(holder, token, asked + granted)

    def renew(self, lease: Lease) -> Lease:
        with self._guard:
            grant = self._grants.get(lease.token, 0)
        asked = clock()
        answer = self._gateway.call("/v3/lease/keepalive", {"ID": grant}, KeptAlive)
        now = self.current().lease
        if answer.result.seconds == 0 or now is None or now.token != lease.token:
            raise deposed(lease.token, now)
        return Lease(lease.holder, lease.token, asked + answer.result.seconds)

    def release(self, lease: Lease) -> None:
        with self._guard:
            grant = self._grants.get(lease.token)
        if grant is None:
            return
        self._gateway.call(
            "/v3/kv/txn",
            {
                "compare": [_created(self._leader, lease.token)],
                "success": [{"request_delete_range": {"key": self._leader}}],
            },
            Txn,
        )
        with self._guard:
            self._grants.pop(lease.token, None)
        self._revoke(grant)

    def current(self) -> LeaseView:
        answer = self._gateway.call("/v3/kv/range", {"key": self._leader}, Range)
        return _view(answer.kvs[0] if answer.kvs else None, answer.header.revision)

    def watch(self, on_view: Callable[[LeaseView], None]) -> EtcdWatch:
        return EtcdWatch(self.current, self._watch_from, on_view)

    def put(self, key: str, value: bytes, token: int) -> None:
        """Each write names the revision that it replaces, so a write whose reply was lost, and which etcd may still carry out,
        cannot undo the next one; and the grant, whose random id is unique even if etcd lost its data and counts again."""
        path, value = self._path_of(key), check_value(key, value)
        with self._guard:
            grant = self._grants.get(token, 0)
        for _ in range(_PUT_ATTEMPTS):
            replaced = self._written.get(path, 0)
            answer = self._gateway.call(
                "/v3/kv/txn",
                {
                    "compare": [
                        _created(self._leader, token),
                        {"key": self._leader, "target": "LEASE", "lease": grant},
                        {"key": path, "target": "MOD", "mod_revision": replaced},
                    ],
                    "success": [{"request_put": {"key": path, "value": value}}],
                    "failure": [{"request_range": {"key": self._leader}}, {"request_range": {"key": path}}],
                },
                Txn,
            )
            if answer.succeeded:
                self._written[path] = answer.header.revision
                return
            leader, written = answer.found(0), answer.found(1)
            if leader is None or (leader.create_revision, leader.lease) != (token, grant):
                raise deposed(token, None if leader is None else _view(leader, 0).lease)
            self._written[path] = 0 if written is None else written.mod_revision
        raise StoreUnreachable(
            f"{key!r} is written by other processes all the time; only the leader may write it"
        )

    def get(self, key: str) -> bytes | None:
        path = self._path_of(key)
        answer = self._gateway.call("/v3/kv/range", {"key": path}, Range)
        self._written[path] = answer.kvs[0].mod_revision if answer.kvs else 0
        return answer.kvs[0].value if answer.kvs else None

    def close(self) -> None:
        self._gateway.close()

    def _watch_from(self, revision: int) -> ResponseStream:
        return self._gateway.stream(
            "/v3/watch", {"create_request": {"key": self._leader, "start_revision": revision}}
        )

    def _grant(self, grant: int, ttl: int) -> int:
        """The seconds that etcd granted."""
        try:
            return self._gateway.call("/v3/lease/grant", {"ID": grant, "TTL": ttl}, Granted).seconds
        except StoreRefused as refusal:
            if "lease already exists" not in str(refusal):
                raise
        # An earlier attempt succeeded, and its reply was lost. etcd may have granted more, never less.
        return ttl

    def _revoke(self, grant: int) -> None:
        try:
            self._gateway.call("/v3/lease/revoke", {"ID": grant}, EtcdEmpty)
        except StoreRefused as refusal:
            if "lease not found" not in str(refusal):
                raise

    def _path_of(self, key: str) -> bytes:
        return (self._data + check_key(key)).encode()


class EtcdWatch:
    """Implements `base.LeaseWatch`, in a thread of its own: reads the lease, then watches from the next revision on. Starts
    over when the connection breaks, or when etcd has compacted that revision."""

    def __init__(
        self,
        look: Callable[[], LeaseView],
        follow: Callable[[int], ResponseStream],
        on_view: Callable[[LeaseView], None],
    ) -> None:
        self._look, self._follow, self._on_view = look, follow, on_view
        self._closed = threading.Event()
        self._guard = threading.Lock()
        self._stream: ResponseStream | None = None
        self._thread = threading.Thread(target=self._run, name="lease-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with self._guard:
            if self._stream is not None:
                self._stream.close()
        self._thread.join()

    def _run(self) -> None:
        pause, longest = _RECONNECT_S
        while not self._closed.is_set():
            try:
                view = self._look()
                self._on_view(view)
                self._follow_from(view.as_of + 1)
                pause, _ = _RECONNECT_S
            except LeaseError:
                pause = min(2 * pause, longest)
            self._closed.wait(pause)

    def _follow_from(self, revision: int) -> None:
        stream = self._follow(revision)
        with self._guard:
            self._stream = stream
        try:
            if self._closed.is_set():
                return
            for message in stream:
                if message.canceled or self._closed.is_set():
                    return
                for event in message.events:
                    gone = event.type == "DELETE"
                    self._on_view(_view(None if gone else event.kv, event.kv.mod_revision))
        finally:
            with self._guard:
                self._stream = None
            stream.discard()


def _created(key: bytes, revision: int) -> dict[str, object]:
    """A condition: the key was created at this revision; 0: it does not exist."""
    return {"key": key, "target": "CREATE", "create_revision": revision}


def _view(leader: KeyValue | None, revision: int) -> LeaseView:
    if leader is None:
        return LeaseView(None, revision)
    try:
        holder = decode(leader.value, _Leader).holder
    except msgspec.MsgspecError as error:
        raise StoreRefused(
            f"{leader.key.decode()} in etcd has a value that no agent of this version wrote ({error}); choose another prefix"
        ) from error
    return LeaseView(Lease(holder, leader.create_revision), revision)
