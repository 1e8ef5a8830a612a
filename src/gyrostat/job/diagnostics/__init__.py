"""Finds what is wrong with a worker: black box, memory, stacks, watchdog, heartbeats, stragglers."""
