"""Checkpoints on disk, without sockets: manifests, and the files of slots.

checkpoint_files   which checkpoints exist, are valid, and can be deleted
slot_files         one slot as a file
"""
