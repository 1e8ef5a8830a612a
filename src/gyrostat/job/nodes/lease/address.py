"""Addresses of lease stores.

    file:///absolute/directory
    etcd://HOST:PORT[,HOST:PORT…]/PREFIX        without TLS
    etcds://HOST:PORT[,HOST:PORT…]/PREFIX       with TLS

To authenticate, write etcd://NAME:PASSWORD@HOST…, or better set GYROSTAT_ETCD_USER and GYROSTAT_ETCD_PASSWORD, which `ps`
does not show. For TLS, ?ca=FILE is the trusted authority (default: the system's), ?cert=FILE&key=FILE the client certificate;
or set GYROSTAT_ETCD_CA, GYROSTAT_ETCD_CERT, GYROSTAT_ETCD_KEY. The address takes precedence over the environment.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from gyrostat.core.errors import LeaseError, StoreUnreachable, StoreUnusable
from gyrostat.job import environment
from gyrostat.job.nodes.lease.base import LeaseStore
from gyrostat.job.nodes.lease.etcd import EtcdStore
from gyrostat.job.nodes.lease.etcd_gateway import Servers
from gyrostat.job.nodes.lease.file import FileStore

_DEFAULT_PORT = 2379
_CHECK_AGAIN_S = 0.25
_FORMS = "write file:///directory, etcd://host:port/prefix or etcds://host:port/prefix"
_TLS_OPTIONS = ("ca", "cert", "key")


def open_store(
    address: str,
    env: Mapping[str, str] | None = None,
    *,
    wait_s: float = 0.0,
    on_wait: Callable[[str], None] = lambda why: None,
) -> LeaseStore:
    """Open the store at this address, and check that it answers. Raises `StoreUnusable` with advice.

    A store that cannot be reached is tried again for `wait_s` seconds, after a call of `on_wait` with the reason.
    """
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise StoreUnusable(
            f"{_shown(address)} is not the address of a lease store ({error}): {_FORMS}"
        ) from error
    if parts.scheme == "file":
        return FileStore(_directory(address, parts))
    if parts.scheme in ("etcd", "etcds"):
        return _open_etcd(address, parts, environment.variables() if env is None else env, wait_s, on_wait)
    raise StoreUnusable(f"{_shown(address)} is not the address of a lease store: {_FORMS}")


def etcd_servers(address: str, parts: SplitResult, env: Mapping[str, str]) -> Servers:
    """The servers and credentials of an etcd address and the environment, checked without a request."""
    login, _, hosts = parts.netloc.rpartition("@")
    name, _, password = login.partition(":")
    user = unquote(name) or env.get("GYROSTAT_ETCD_USER") or None
    return Servers(
        endpoints=tuple(_endpoint(address, host) for host in hosts.split(",")),
        tls=_tls(address, parts, env),
        user=user,
        password=unquote(password) or env.get("GYROSTAT_ETCD_PASSWORD", ""),
    )


def _open_etcd(
    address: str,
    parts: SplitResult,
    env: Mapping[str, str],
    wait_s: float,
    on_wait: Callable[[str], None],
) -> LeaseStore:
    prefix = unquote(parts.path).rstrip("/")
    if not prefix:
        raise StoreUnusable(
            f"{_shown(address)} has no prefix; add one that only this job uses, as in etcd://host:2379/jobs/42"
        )
    store = EtcdStore(etcd_servers(address, parts, env), prefix)
    try:
        _check(store, wait_s, on_wait)
    except LeaseError as error:
        store.close()
        raise StoreUnusable(
            f"the lease store {_shown(address)} cannot be used: {error}{_advice(parts.scheme, str(error))}"
        ) from error
    return store


def _check(store: EtcdStore, wait_s: float, on_wait: Callable[[str], None]) -> None:
    """Whether it answers; again and again, if that may change."""
    deadline, reported = time.monotonic() + wait_s, False
    while True:
        try:
            return store.check()
        except StoreUnreachable as error:
            if time.monotonic() >= deadline:
                raise
            if not reported:
                on_wait(str(error))
            reported = True
            time.sleep(_CHECK_AGAIN_S)


def _directory(address: str, parts: SplitResult) -> Path:
    path = Path(unquote(parts.path))
    if parts.netloc or parts.query or parts.fragment or len(path.parts) < 2:
        raise StoreUnusable(
            f"{_shown(address)} does not name a directory of this machine; write file:/// and its absolute path"
        )
    return path


def _endpoint(address: str, text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or text.endswith(":") or port == 0:
        raise StoreUnusable(
            f"{text!r} in {_shown(address)} is not a server; write host:port, as in 10.0.0.1:2379"
        )
    return host, port or _DEFAULT_PORT


def _tls(address: str, parts: SplitResult, env: Mapping[str, str]) -> ssl.SSLContext | None:
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(given.keys() - set(_TLS_OPTIONS)):
        raise StoreUnusable(
            f"{_shown(address)} has the unknown option {unknown[0]!r}; the options are {', '.join(_TLS_OPTIONS)}"
        )
    if parts.scheme == "etcd":
        if given:
            raise StoreUnusable(
                f"{_shown(address)} has options for TLS, but etcd:// is without TLS; write etcds://"
            )
        return None
    files = {name: given.get(name) or env.get(f"GYROSTAT_ETCD_{name.upper()}") for name in _TLS_OPTIONS}
    try:
        context = ssl.create_default_context(cafile=files["ca"])
        if files["cert"]:
            context.load_cert_chain(files["cert"], files["key"])
    except OSError as error:
        named = ", ".join(f"{name}={file}" for name, file in files.items() if file)
        raise StoreUnusable(
            f"the TLS files for {_shown(address)} cannot be used ({named}): {error}"
        ) from error
    return context


def _advice(scheme: str, error: str) -> str:
    """What to do about the error."""
    broke_off = "does the server use TLS and require a client certificate (?cert=FILE&key=FILE)?"
    if scheme == "etcd":
        broke_off = "does the server require TLS (etcds://)?"
    hints = {
        "authentication failed": "check the user's name and password",
        "user name is empty": "this etcd requires authentication: set GYROSTAT_ETCD_USER and GYROSTAT_ETCD_PASSWORD",
        "authentication is not enabled": "this etcd has no users: remove name and password",
        "permission denied": "grant the user's role readwrite on the prefix",
        "CERTIFICATE_VERIFY_FAILED": "give the authority that signed its certificate with ?ca=FILE",
        "SSL": broke_off,
        "EOF": broke_off,
        "reset by peer": broke_off,
        "without response": broke_off,
        "HTTP status 400": broke_off,
        "HTTP status 404": "is the server etcd 3.4 or later, with its JSON gateway enabled?",
        "is not one of etcd": "is the server etcd?",
        "no answer": "is it running, and is the address right?",
    }
    return next((f"; {hint}" for sign, hint in hints.items() if sign in error), "")


def _shown(address: str) -> str:
    """Without a password."""
    scheme, mark, rest = address.partition("://")
    login, at, where = rest.rpartition("@")
    name, colon, _ = login.partition(":")
    return repr(f"{scheme}{mark}{name}{':…' if colon else ''}{at}{where}")
