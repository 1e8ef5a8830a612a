"""One server process: `python -m gyrostat.ps.server`, started by the leader (`control/server_processes.py`). No torch.

process      the event loop: connections, and the actions that `protocol.slot_server` decides on
file_thread  files are written and read by a thread
heap         keeps the memory that requests free
load         what the process has done, by slot
"""
