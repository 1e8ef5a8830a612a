"""`python -m gyrostat.ps.server`: a server process. Its settings are a line of JSON on stdin: no token is on a command line."""

from __future__ import annotations

import sys

import msgspec

from gyrostat.ps.server.heap import keep_request_memory
from gyrostat.ps.server.process import ServerProcess, ServerProcessSettings


def main(process: type[ServerProcess] = ServerProcess) -> None:
    keep_request_memory()
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerProcessSettings)
    process(settings).run()


if __name__ == "__main__":
    main()
