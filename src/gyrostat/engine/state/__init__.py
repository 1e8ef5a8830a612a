"""Training state as values: state trees, tensor bytes, flat copies, digests."""
