"""Addresses: what they say, and what is said about wrong ones; logins and TLS with a real etcd."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gyrostat.core.errors import StoreUnusable
from gyrostat.job.nodes.lease import Lease, LeaseView, open_store
from gyrostat.job.nodes.lease.address import etcd_servers
from gyrostat.job.nodes.lease.etcd import EtcdStore
from gyrostat.job.nodes.lease.etcd_gateway import Servers
from gyrostat.job.nodes.lease.file import FileStore
from tests.job.nodes.lease.etcd_server import BINARY, MISSING, EtcdServer

NO_ENV: dict[str, str] = {}


def servers(address: str, env: dict[str, str] = NO_ENV) -> Servers:
    return etcd_servers(address, urlsplit(address), env)


def test_a_file_address_opens_a_directory(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/with%20space", NO_ENV)
    assert isinstance(store, FileStore)
    assert (tmp_path / "with space" / "data").is_dir()


def test_what_an_etcd_address_says() -> None:
    assert servers("etcd://10.0.0.1:4000/jobs/1").endpoints == (("10.0.0.1", 4000),)
    assert servers("etcd://a,b:1,[::1]:2/x").endpoints == (("a", 2379), ("b", 1), ("::1", 2))
    full = servers(
        "etcd://na%40me:p%3Ass@h/x", {"GYROSTAT_ETCD_USER": "other", "GYROSTAT_ETCD_PASSWORD": "q"}
    )
    assert (full.user, full.password) == ("na@me", "p:ss")
    by_env = servers("etcd://h/x", {"GYROSTAT_ETCD_USER": "other", "GYROSTAT_ETCD_PASSWORD": "q"})
    assert (by_env.user, by_env.password) == ("other", "q")
    assert servers("etcd://h/x").user is None
    assert servers("etcd://h/x").tls is None
    assert servers("etcds://h/x").tls is not None


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "is not the address of a lease store: write file:///directory, etcd://"),
        ("/var/run/lease", "is not the address of a lease store"),
        ("zookeeper://host/x", "'zookeeper://host/x' is not the address"),
        ("etcd://[::1/x", "is not the address of a lease store"),
        ("file://relative/path", "write file:/// and its absolute path"),
        ("file:///", "does not name a directory"),
        ("file:///tmp/x?ca=1", "does not name a directory"),
        ("etcd://host:2379", "has no prefix"),
        ("etcd://host:2379/", "has no prefix"),
        ("etcd:///x", "'' in 'etcd:///x' is not a server; write host:port"),
        ("etcd://host:/x", "'host:' in"),
        ("etcd://host:0/x", "'host:0' in"),
        ("etcd://host:seven/x", "'host:seven' in"),
        ("etcd://a,,b/x", "'' in 'etcd://a,,b/x'"),
        ("etcd://name:secret@host:0/x", "in 'etcd://name:…@host:0/x'"),
        ("etcd://host/x?ca=/ca.pem", "etcd:// is without TLS; write etcds://"),
        ("etcds://host/x?cafile=/ca.pem", "the unknown option 'cafile'; the options are ca, cert, key"),
        ("etcds://host/x?ca=/no/such.pem", "(ca=/no/such.pem): [Errno 2] No such file"),
    ],
)
def test_bad_addresses_are_explained(address: str, said: str) -> None:
    with pytest.raises(StoreUnusable) as caught:
        open_store(address, NO_ENV)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_directory_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="give a directory that this user may create and write"):
        open_store(f"file://{tmp_path}/file/store", NO_ENV)


def test_an_etcd_that_is_not_there_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StoreUnusable) as caught:
        open_store(f"etcd://name:secret@127.0.0.1:{port}/jobs/1", NO_ENV)
    assert f"no answer from etcd at 127.0.0.1:{port}: [Errno 111] Connection refused" in str(caught.value)
    assert "is it running, and is the address right?" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Knows root, and trainer, who may write below /jobs/ and nowhere else."""
    if BINARY is None:
        pytest.skip(MISSING)
    server = EtcdServer(tmp_path_factory.mktemp("guarded"), ["--bcrypt-cost", "4"])
    server.start()
    for path, body in (
        ("user/add", {"name": "root", "password": "r"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("role/add", {"name": "jobs"}),
        (
            "role/grant",
            {"name": "jobs", "perm": {"permType": 2, "key": "L2pvYnMv", "range_end": "L2pvYnMw"}},
        ),
        ("user/add", {"name": "trainer", "password": "t"}),
        ("user/grant", {"user": "trainer", "role": "jobs"}),
        ("enable", {}),
    ):
        server.request(f"/v3/auth/{path}", json.dumps(body))
    yield server
    server.stop()


def test_with_the_right_password(guarded: EtcdServer) -> None:
    env = {"GYROSTAT_ETCD_USER": "trainer", "GYROSTAT_ETCD_PASSWORD": "t"}
    store = open_store(guarded.address("jobs/1"), env)
    lease = store.acquire("a", 5)
    assert isinstance(lease, Lease)
    store.put("generation", b"1", lease.token)
    other = open_store(f"etcd://trainer:t@{guarded.host}/jobs/1", NO_ENV)
    assert other.get("generation") == b"1"
    store.release(lease)
    other.close()
    store.close()


def test_a_login_that_lapsed_is_made_again(guarded: EtcdServer) -> None:
    store = open_store(f"etcd://trainer:t@{guarded.host}/jobs/2", NO_ENV)
    assert isinstance(store, EtcdStore)
    assert store.current().lease is None
    store._gateway._token = "lapsed.1"
    assert store.current().lease is None
    assert isinstance(store.acquire("a", 5), Lease)
    store.close()


@pytest.mark.parametrize(
    ("login", "prefix", "said"),
    [
        ("trainer:wrong@", "jobs/1", "check the user's name and password"),
        ("nobody:t@", "jobs/1", "check the user's name and password"),
        ("", "jobs/1", "set GYROSTAT_ETCD_USER and GYROSTAT_ETCD_PASSWORD"),
        ("trainer:t@", "elsewhere", "grant the user's role readwrite on the prefix"),
    ],
)
def test_wrong_logins_are_explained(guarded: EtcdServer, login: str, prefix: str, said: str) -> None:
    with pytest.raises(StoreUnusable) as caught:
        open_store(f"etcd://{login}{guarded.host}/{prefix}", NO_ENV)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_login_where_none_is_known_is_explained(shared_etcd: EtcdServer) -> None:
    with pytest.raises(StoreUnusable, match="this etcd has no users: remove name and password"):
        open_store(f"etcd://trainer:t@{shared_etcd.host}/jobs/1", NO_ENV)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certificates that it signed for the server and for us."""
    directory = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    (directory / "san").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("server", "client"):
        openssl("req", "-new", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return directory


@pytest.fixture(scope="module")
def secured(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Shows a certificate, and wants to see one."""
    if BINARY is None:
        pytest.skip(MISSING)
    options = ["--cert-file", f"{files}/server.pem", "--key-file", f"{files}/server.key"]
    options += ["--client-cert-auth", "--trusted-ca-file", f"{files}/ca.pem"]
    server = EtcdServer(tmp_path_factory.mktemp("secured"), options, scheme="https")
    server.start()
    yield server
    server.stop()


def test_both_sides_show_certificates(secured: EtcdServer, files: Path) -> None:
    options = f"ca={files}/ca.pem&cert={files}/client.pem&key={files}/client.key"
    store = open_store(f"{secured.address('jobs/1')}?{options}", NO_ENV)
    seen: list[LeaseView] = []
    watch = store.watch(seen.append)
    lease = store.acquire("a", 5)
    assert isinstance(lease, Lease)
    store.put("generation", b"1", lease.token)
    env = {
        f"GYROSTAT_ETCD_{name}": f"{files}/{file}"
        for name, file in (("CA", "ca.pem"), ("CERT", "client.pem"), ("KEY", "client.key"))
    }
    other = open_store(secured.address("jobs/1"), env)
    assert other.get("generation") == b"1"
    store.release(lease)
    watch.close()
    other.close()
    store.close()


@pytest.mark.parametrize(
    ("scheme", "options", "said"),
    [
        ("etcds", "", "give the authority that signed its certificate with ?ca=FILE"),
        (
            "etcds",
            "?ca={files}/ca.pem",
            "does the server use TLS and require a client certificate (?cert=FILE&key=FILE)?",
        ),
        ("etcd", "", "does the server require TLS (etcds://)?"),
    ],
)
def test_what_is_missing_is_explained(
    secured: EtcdServer, files: Path, scheme: str, options: str, said: str
) -> None:
    with pytest.raises(StoreUnusable) as caught:
        open_store(f"{scheme}://{secured.host}/jobs/1{options.format(files=files)}", NO_ENV)
    assert said in str(caught.value)


def test_tls_where_there_is_none_is_explained(shared_etcd: EtcdServer) -> None:
    with pytest.raises(StoreUnusable, match="does the server use TLS"):
        open_store(f"etcds://{shared_etcd.host}/jobs/1", NO_ENV)
