"""A light agent as a process of its own: `python -m tests.job.nodes.lease.agent ADDRESS NAME TTL`.

Says on standard output what happens to it, one line each ("lead 7", "follow b", "lost …"), and does what lines on standard
input say: "put KEY VALUE" under the last token it led by, "close".
"""

from __future__ import annotations

import queue
import select
import subprocess
import sys
import threading
from pathlib import Path

from gyrostat.core.errors import Deposed
from gyrostat.job.nodes.lease import Campaign, Timing, open_store

ROOT = Path(__file__).parents[4]
TIMEOUT_S = 120.0


def main(address: str, name: str, ttl: str) -> None:
    store = open_store(address)
    tokens: list[int] = []
    says: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def on_lead(token: int) -> None:
        tokens.append(token)
        says.put(f"lead {token}")

    speaker = threading.Thread(target=_speak, args=(says,))
    speaker.start()
    with Campaign(
        store,
        name,
        on_lead=on_lead,
        on_follow=lambda holder: says.put(f"follow {holder}"),
        on_lost=lambda why: says.put(f"lost {why}"),
        timing=Timing(ttl=float(ttl)),
    ):
        for line in sys.stdin:
            match line.split():
                case ["put", key, value]:
                    try:
                        store.put(key, value.encode(), tokens[-1])
                        says.put("written")
                    except Deposed:
                        says.put("refused")
                case ["close"]:
                    break
    says.put(None)
    speaker.join()
    store.close()


def _speak(says: queue.SimpleQueue[str | None]) -> None:
    while (line := says.get()) is not None:
        print(line, flush=True)


class AgentProcess:
    """One of them, seen from a test."""

    def __init__(self, address: str, name: str, ttl: float) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.job.nodes.lease.agent", address, name, str(ttl)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self.pid = self._process.pid

    def says(self) -> str:
        """The next line."""
        assert self._process.stdout is not None
        line = b""
        poll = select.poll()  # unlike select, it takes any number of a file
        poll.register(self._process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            assert poll.poll(TIMEOUT_S * 1000), f"{self.name} says nothing"
            byte = self._process.stdout.raw.read(1)  # type: ignore[attr-defined]
            assert byte, f"{self.name} ended"
            line += byte
        return line.decode().strip()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        """At once, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
