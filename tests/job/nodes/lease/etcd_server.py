"""A real etcd server on loopback, with free ports and a directory of its own."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

BINARY = shutil.which("etcd")
MISSING = "needs Debian's package etcd-server"
READY_S = 120.0


class EtcdServer:
    """Runs from `start` to `stop`; may be killed and started again with the data it had."""

    def __init__(
        self,
        directory: Path,
        options: Sequence[str] = (),
        *,
        scheme: str = "http",
        at: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        """`at`: the address it serves. `prefix`: a command to run it by."""
        self._at, self._prefix = at, prefix
        self._directory = directory
        self._options = options
        self._scheme = scheme
        self.port, peer_port = _free_ports(2)
        self._peer = f"http://127.0.0.1:{peer_port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"{self._at}:{self.port}"

    def address(self, prefix: str) -> str:
        return f"{'etcds' if self._scheme == 'https' else 'etcd'}://{self.host}/{prefix}"

    def start(self) -> None:
        """Returns when etcd says to its service manager, as which we pose, that it is ready."""
        assert BINARY is not None
        client = f"{self._scheme}://{self.host}"
        notify_socket = self._directory / "ready"
        notify_socket.unlink(missing_ok=True)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
            (self._directory / "etcd.log").open("ab") as log,
        ):
            ready.bind(str(notify_socket))
            ready.settimeout(READY_S)
            self._process = subprocess.Popen(
                [
                    *self._prefix,
                    BINARY,
                    *("--name", "test", "--data-dir", str(self._directory / "data"), "--logger", "zap"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer),
                    *("--initial-cluster", f"test={self._peer}"),
                    *self._options,
                ],
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(notify_socket)},
            )
            try:
                assert ready.recv(100) == b"READY=1"
            except TimeoutError:
                self.stop()
                raise RuntimeError((self._directory / "etcd.log").read_text()[-2000:]) from None

    def kill(self) -> None:
        """As a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def lose_data(self) -> None:
        """It is gone, and so is its disk; the next one begins empty."""
        self.kill()
        shutil.rmtree(self._directory / "data")

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # it may answer until it has really stopped

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self.kill()

    def request(self, path: str, body: str) -> bytes:
        """One request as an operator would send it, in the clear."""
        with contextlib.closing(http.client.HTTPConnection(self.host, timeout=60)) as connection:
            connection.request("POST", path, body)
            response = connection.getresponse()
            data = response.read()
            assert response.status == 200, data
            return data


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_together:
        sockets = [open_together.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
