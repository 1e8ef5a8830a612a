"""One mini-batch: virtual workers, their contexts, buffers and batches, and the DDP reference."""
