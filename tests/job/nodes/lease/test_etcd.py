"""What only etcd can do to a store: forget history, drop connections, answer elsewhere, carry out late what was asked early."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from gyrostat.core.errors import Deposed, StoreUnreachable
from gyrostat.job.nodes.lease import Lease, LeaseView, open_store
from gyrostat.job.nodes.lease.etcd import EtcdStore
from gyrostat.job.nodes.lease.etcd_gateway import Servers
from tests.job.nodes.lease.etcd_server import EtcdServer

TIMEOUT_S = 120.0


class Views:
    """What a watch saw, in order."""

    def __init__(self) -> None:
        self._views: list[LeaseView] = []
        self._news = threading.Condition()

    def saw(self, view: LeaseView) -> None:
        with self._news:
            self._views.append(view)
            self._news.notify()

    def wait_for(self, holder: str | None) -> LeaseView:
        with self._news:
            assert self._news.wait_for(lambda: self._newest_holder() == (holder,), timeout=TIMEOUT_S), (
                self._views
            )
            return self._views[-1]

    def _newest_holder(self) -> tuple[str | None] | None:
        if not self._views:
            return None
        lease = self._views[-1].lease
        return (lease.holder if lease else None,)


class Proxy:
    """Passes connections on to a server until `cut` is called."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._guard = threading.Lock()
        self._open: list[socket.socket] = []
        self._relays: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def cut(self) -> None:
        """All connections break off; new ones are passed on."""
        with self._guard:
            ends, self._open = self._open, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self.cut()
        for relay in self._relays:
            relay.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                with self._guard:
                    self._open += [near, far]
                self._relays.append(threading.Thread(target=_relay, args=(near, far)))
                self._relays[-1].start()


def _relay(near: socket.socket, far: socket.socket) -> None:
    back = threading.Thread(target=_pump, args=(far, near))
    with near, far:
        back.start()
        _pump(near, far)
        back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(shared_etcd: EtcdServer) -> Iterator[Proxy]:
    proxy = Proxy(shared_etcd.port)
    yield proxy
    proxy.close()


def win(store: EtcdStore, holder: str) -> Lease:
    lease = store.acquire(holder, 60)
    assert isinstance(lease, Lease)
    return lease


def open_etcd(address: str) -> EtcdStore:
    store = open_store(address)
    assert isinstance(store, EtcdStore)
    return store


def test_a_lost_watch_is_made_again_and_tells_what_happened_meanwhile(
    shared_etcd: EtcdServer, proxy: Proxy
) -> None:
    watched = open_etcd(f"etcd://127.0.0.1:{proxy.port}/lost-watch")
    other = open_etcd(shared_etcd.address("lost-watch"))
    views = Views()
    watch = watched.watch(views.saw)
    views.wait_for(None)
    for holder in ("a", "b", "c"):
        proxy.cut()
        lease = win(other, holder)
        assert views.wait_for(holder).lease == Lease(holder, lease.token)
        proxy.cut()
        other.release(lease)
        views.wait_for(None)
    watch.close()
    watched.close()
    other.close()


def test_requests_survive_connections_that_were_cut_while_idle(proxy: Proxy) -> None:
    store = open_etcd(f"etcd://127.0.0.1:{proxy.port}/cut")
    lease = win(store, "a")
    for number in range(3):
        proxy.cut()
        store.put("generation", str(number).encode(), lease.token)
        proxy.cut()
        assert store.renew(lease).token == lease.token
    assert store.get("generation") == b"2"
    proxy.cut()
    store.release(lease)
    store.close()


def test_a_watch_goes_on_after_etcd_forgot_the_revision_it_stands_at(own_etcd: EtcdServer) -> None:
    proxy = Proxy(own_etcd.port)
    watched = open_etcd(f"etcd://127.0.0.1:{proxy.port}/jobs/1")
    other = open_etcd(own_etcd.address("jobs/1"))
    views = Views()
    watch = watched.watch(views.saw)
    views.wait_for(None)
    tokens = []
    for holder in ("a", "b"):
        lease = win(other, holder)
        views.wait_for(holder)
        tokens.append(lease.token)
        proxy.cut()
        other.release(lease)
        revision = other.current().as_of
        own_etcd.request("/v3/kv/compaction", json.dumps({"revision": revision, "physical": True}))
        views.wait_for(None)
    assert tokens == sorted(set(tokens))
    watch.close()
    proxy.close()
    watched.close()
    other.close()


def test_a_watch_from_a_compacted_revision_is_an_error(own_etcd: EtcdServer) -> None:
    store = open_etcd(own_etcd.address("jobs/1"))
    for holder in ("a", "b"):
        store.release(win(store, holder))
    own_etcd.request("/v3/kv/compaction", json.dumps({"revision": store.current().as_of}))
    stream = store._watch_from(1)
    assert [message.canceled for message in itertools.islice(stream, 2)] == [False, True]
    stream.close()
    stream.discard()
    store.close()


def test_a_server_that_is_down_is_passed_over(shared_etcd: EtcdServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        down = taken.getsockname()[1]
        taken.close()
        store = open_etcd(f"etcd://127.0.0.1:{down},{shared_etcd.host}/passed-over")
    lease = win(store, "a")
    store.put("generation", b"1", lease.token)
    views = Views()
    watch = store.watch(views.saw)
    views.wait_for("a")
    store.release(lease)
    views.wait_for(None)
    watch.close()
    store.close()


def test_a_write_that_etcd_carries_out_late_does_not_undo_the_one_after_it(shared_etcd: EtcdServer) -> None:
    late, prompt = (open_etcd(shared_etcd.address("late")) for _ in range(2))
    lease = win(late, "a")
    late.put("generation", b"1", lease.token)
    delayed: list[object] = []
    call = late._gateway.call

    def hold_back(path: str, request: object, answer: type[object]) -> object:
        delayed.append(request)
        raise StoreUnreachable("no answer")

    late._gateway.call = hold_back  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnreachable):
        late.put("generation", b"2", lease.token)
    late._gateway.call = call  # type: ignore[method-assign]
    late.put("generation", b"3", lease.token)
    (request,) = delayed
    late._gateway.call("/v3/kv/txn", request, dict)
    assert prompt.get("generation") == b"3"
    late.release(lease)
    late.close()
    prompt.close()


def test_a_leader_key_that_an_operator_deletes_ends_the_lease(shared_etcd: EtcdServer) -> None:
    store = open_etcd(shared_etcd.address("deleted"))
    lease = win(store, "a")
    key = base64.b64encode(b"/deleted/leader").decode()
    shared_etcd.request("/v3/kv/deleterange", json.dumps({"key": key}))
    with pytest.raises(Deposed):
        store.renew(lease)
    with pytest.raises(Deposed):
        store.put("generation", b"1", lease.token)
    store.close()


def test_etcd_that_hangs_is_given_up_in_time(own_etcd: EtcdServer) -> None:
    store = open_etcd(own_etcd.address("jobs/1"))
    own_etcd.pause()
    with pytest.raises(StoreUnreachable, match="timed out"):
        store.current()
    own_etcd.resume()
    assert store.current().lease is None
    store.close()


def test_no_server_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    store = EtcdStore(Servers(endpoints=(("127.0.0.1", port),)), "/jobs/1")
    with pytest.raises(StoreUnreachable, match=f"no answer from etcd at 127.0.0.1:{port}: .*refused"):
        store.acquire("a", 5)
