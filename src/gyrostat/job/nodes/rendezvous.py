"""The rendezvous of a node: where workers of a generation connect to each other if this node's agent leads."""

from __future__ import annotations

import socket

from gyrostat.core.errors import UsageError
from gyrostat.job.processes.start import WorkerForkServer


def serve_rendezvous(source: WorkerForkServer, host: str) -> str:
    """Its address. A child of the fork server serves it, and outlives the agent: workers may leave, gRPC's threads in the agent
    cannot be forked, and workers whose agent was killed connect nevertheless."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            raise UsageError(
                f"cannot listen at {host} ({error}); name an address of this machine: --listen HOST"
            ) from error
        listener.listen(1024)
        host, port = listener.getsockname()[:2]
        source.serve_store(listener)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
