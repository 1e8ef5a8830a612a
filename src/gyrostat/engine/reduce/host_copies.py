"""Copies gradients of a GPU to host memory, where gloo adds them.

The gradients of earlier virtual workers would not fit on the device beside the model. They are copied to pinned host memory on
a side stream, while the device computes. Not run yet on a GPU.
"""

from __future__ import annotations

import torch


class HostCopies:
    """The copies in flight from one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def put(self, view: torch.Tensor, gradient: torch.Tensor, scale: float, divisor: int | None) -> None:
        """Scale `gradient` on its device and begin to copy it into `view`, which is in host memory."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(self._stream):
            view.copy_(gradient * scale if divisor is None else gradient / divisor, non_blocking=True)
        gradient.record_stream(self._stream)  # its memory is not reused before it is copied

    def wait(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()
