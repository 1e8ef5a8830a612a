"""A lease store in a directory, for the agents of one machine.

    lease.json    holder, token, expiry: replaced as a whole, so that readers need no lock
    data/…        one file per key
    lock          held for the moment of a compare-and-swap, never while leading: the kernel frees it when its holder dies

For an observer a lease has expired when the clock says so, or when the observer has seen it unchanged for its time to live. The
second rule needs no common clock, so a lease also expires after a reboot (which resets the clock) or if the clock went back;
and since no process can see a lease before it was written, it never expires too early.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec

from gyrostat.core.errors import LeaseError, StoreRefused, StoreUnreachable, StoreUnusable
from gyrostat.core.files import write_atomically
from gyrostat.job.nodes.lease.base import Lease, LeaseView, check_key, check_value, clock, deposed

POLL_S = 0.025
LOCK_TIMEOUT_S = 2.0
_LOCK_POLL_S = 0.001


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of lease.json. Without a holder, the lease was released."""

    format: int
    token: int
    holder: str | None
    ttl: float
    expires: float
    boot: str
    """The boot whose clock `expires` refers to."""


_NO_LEASE = _Record(format=1, token=0, holder=None, ttl=0.0, expires=0.0, boot="")


class FileStore:
    """Implements `base.LeaseStore`. Tests pass a clock of their own."""

    def __init__(
        self,
        directory: Path,
        *,
        clock: Callable[[], float] = clock,
        boot: str | None = None,
        poll: float = POLL_S,
    ) -> None:
        self._clock = clock
        self._boot = _boot_id() if boot is None else boot
        self._poll = poll
        self._path = directory / "lease.json"
        self._lock = directory / "lock"
        self._data = directory / "data"
        self._seen = (_NO_LEASE, self._clock())
        self._seen_guard = threading.Lock()
        try:
            self._data.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked():
                self._read()
        except (OSError, LeaseError) as error:
            raise StoreUnusable(
                f"the lease store file://{directory} cannot be used: {error}; "
                "give a directory that this user may create and write"
            ) from error

    def acquire(self, holder: str, ttl: float) -> Lease | LeaseView:
        with self._locked():
            record = self._read()
            if self._in_force(record):
                return _view(record)
            now = self._clock()
            return self._write(_Record(1, record.token + 1, holder, ttl, now + ttl, self._boot))

    def renew(self, lease: Lease) -> Lease:
        with self._locked():
            record = self._read_own(lease.token)
            expires = self._clock() + record.ttl
            return self._write(msgspec.structs.replace(record, expires=expires, boot=self._boot))

    def release(self, lease: Lease) -> None:
        with self._locked():
            record = self._read()
            if record.token == lease.token and record.holder is not None:
                self._write(msgspec.structs.replace(record, holder=None))

    def current(self) -> LeaseView:
        record = self._read()
        return _view(record) if self._in_force(record) else LeaseView(None, record.token)

    def watch(self, on_view: Callable[[LeaseView], None]) -> _Poll:
        return _Poll(self.current, on_view, self._poll)

    def put(self, key: str, value: bytes, token: int) -> None:
        path, value = self._path_of(key), check_value(key, value)
        with self._locked():
            self._read_own(token)
            write_atomically(path, value)

    def get(self, key: str) -> bytes | None:
        try:
            return self._path_of(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnreachable(f"{key!r} cannot be read: {error}") from error

    def close(self) -> None:
        """No file stays open."""

    def _in_force(self, record: _Record) -> bool:
        now = self._clock()
        with self._seen_guard:
            seen, since = self._seen
            if record != seen or now < since:
                self._seen = (record, now)
                since = now
        if record.holder is None or now >= since + record.ttl:
            return False
        return record.boot != self._boot or now < record.expires

    def _read(self) -> _Record:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Record)
        except FileNotFoundError:
            return _NO_LEASE
        except OSError as error:
            raise StoreUnreachable(f"the lease cannot be read: {error}") from error
        except msgspec.MsgspecError as error:
            raise StoreRefused(
                f"{self._path} is not a lease file of this version ({error}); if no agent of the job runs, delete it"
            ) from error

    def _read_own(self, token: int) -> _Record:
        record = self._read()
        if record.token != token or not self._in_force(record):
            raise deposed(token, _view(record).lease if self._in_force(record) else None)
        return record

    def _write(self, record: _Record) -> Lease:
        write_atomically(self._path, msgspec.json.encode(record))
        self._in_force(record)
        return Lease(record.holder or "", record.token, record.expires)

    def _path_of(self, key: str) -> Path:
        return self._data / quote(check_key(key), safe="")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclusive among processes and threads. A holder that is stopped by a signal blocks the others until their timeout."""
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnreachable(f"the lease store cannot be written: {error}") from error
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise StoreUnreachable(
                            f"{self._lock} has been held by another process for more than {LOCK_TIMEOUT_S} s; "
                            "is one of the job's agents stopped (state T in ps)?"
                        ) from None
                    time.sleep(_LOCK_POLL_S)
            yield
        except OSError as error:
            raise StoreUnreachable(f"the lease store cannot be written: {error}") from error
        finally:
            os.close(descriptor)


class _Poll:
    """Implements `base.LeaseWatch` by polling, in a thread of its own."""

    def __init__(
        self, look: Callable[[], LeaseView], on_view: Callable[[LeaseView], None], interval: float
    ) -> None:
        self._look, self._on_view, self._interval = look, on_view, interval
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        reported: LeaseView | None = None
        while not self._closed.is_set():
            with contextlib.suppress(LeaseError):
                view = self._look()
                if view != reported:
                    reported = view
                    self._on_view(view)
            self._closed.wait(self._interval)


def _view(record: _Record) -> LeaseView:
    return LeaseView(None if record.holder is None else Lease(record.holder, record.token), record.token)


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"
