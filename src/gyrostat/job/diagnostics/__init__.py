"""Diagnosis of workers: black box, out-of-memory kills, stacks, watchdog, heartbeats, poison micro-batches, stragglers."""
