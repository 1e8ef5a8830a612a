"""Training state as values: state trees, bytes of tensors, copies in one block, digests."""
