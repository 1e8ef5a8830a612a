"""`gyrostat run --store …`: the agent of one node. Each node runs the same command."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gyrostat.cli import environment
from gyrostat.core.errors import UsageError
from gyrostat.core.files import read_text
from gyrostat.core.logs import note

if TYPE_CHECKING:
    from gyrostat.job.control.observer import Observer
    from gyrostat.job.control.run_request import RunRequest


def run_as_agent(
    request: RunRequest,
    observer: Observer,
    *,
    store: str,
    nodes: int,
    node: str | None,
    listen: str | None,
    token_file: Path | None,
    node_timeout: float,
    ttl: float,
) -> int:
    """Run this node's agent until the job ends. Returns the exit code."""
    from gyrostat.job.control.control_socket import check_name
    from gyrostat.job.nodes.agent import Agent
    from gyrostat.job.nodes.lease import Timing, open_store
    from gyrostat.job.nodes.node_options import NodeOptions
    from gyrostat.job.nodes.service import own_host
    from gyrostat.job.processes.signals import caught

    assert request.name is not None
    if request.output.trace is not None:
        raise UsageError("--trace is for a job on one machine; leave out --store or --trace")
    if nodes < 1 or node_timeout <= 0:
        raise UsageError(
            f"--nodes must be 1 or more and --node-timeout above 0, got {nodes} and {node_timeout:g}"
        )
    node = choose_node(node)
    check_name(f"{request.name}.{node}")
    host, port = _parse_listen(listen)
    options = NodeOptions(
        node=node,
        nodes=nodes,
        host=host or (own_host(_server(store)) if store.startswith("etcd") else "127.0.0.1"),
        port=port,
        token=read_token(token_file),
        node_timeout=node_timeout,
        timing=Timing(ttl=ttl, agents=nodes),
    )
    lease = open_store(
        job_address(store, request.name),
        wait_s=node_timeout,
        on_wait=lambda why: note(f"the lease store: {why}; trying again for {node_timeout:g} s"),
    )
    with (
        caught() as signals,
        Agent(request, options, lease, observer, signals=signals, tell=note) as agent,
    ):
        return agent.run()


def job_address(store: str, name: str) -> str:
    """The job's own prefix in a lease store of several jobs."""
    parts = urlsplit(store)
    path = parts.path.rstrip("/") or "/gyrostat"
    return parts._replace(path=f"{path}/{name}").geturl()


def choose_node(node: str | None) -> str:
    """Default: the host name."""
    return node if node is not None else socket.gethostname().partition(".")[0]


def read_token(file: Path | None) -> str | None:
    """From a file or the environment; not from the command line, which all users of the machine can read."""
    if file is None:
        return environment.token()
    token = read_text(file, "the token file").strip()
    if not token:
        raise UsageError(f"the token file {file} is empty; write a long random string into it")
    return token


def _server(store: str) -> str:
    """The first server of an etcd address."""
    server = urlsplit(store).netloc.rpartition("@")[2].split(",")[0]
    return server if server.rpartition(":")[2].isdigit() else f"{server}:2379"


def _parse_listen(text: str | None) -> tuple[str | None, int]:
    """`HOST` or `HOST:PORT`."""
    if text is None:
        return None, 0
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        return text.strip("[]"), 0
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--listen takes HOST or HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)
