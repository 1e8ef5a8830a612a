"""Frames between workers, servers and the leader: a fixed header and raw buffers; sizes are checked before memory is taken."""
