"""Frames between workers, servers and the leader: a fixed header and raw buffers; sizes are checked before memory is taken.

frames       the header, what may follow it, and a reader that receives into one buffer
handshake    both ends of a connection prove that they know the job's token, before anything else is read
connection   a socket in a selector: frames in, frames out, never blocks
codec        exchanges and slots as frames: a few numbers as msgspec, then arrays as they are in memory
control      messages that are not about rows: workers ↔ leader, servers ↔ leader
"""
