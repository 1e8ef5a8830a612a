"""Gradients of a GPU on their way to host memory, where gloo adds them.

Earlier virtual workers' gradients would not fit on the device beside the model; they go to pinned host memory on a side
stream, while the device computes on. Written with care, but not run: there was no GPU to run it on.
"""

from __future__ import annotations

import torch


class HostCopies:
    """Copies under way from one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def put(self, view: torch.Tensor, gradient: torch.Tensor, scale: float, divisor: int | None) -> None:
        """Scale `gradient` on its device and begin to copy it into `view`."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(self._stream):
            view.copy_(gradient * scale if divisor is None else gradient / divisor, non_blocking=True)
        gradient.record_stream(self._stream)  # its memory is not reused before it is copied

    def wait(self) -> None:
        """All copies have arrived."""
        if self._stream is not None:
            self._stream.synchronize()
