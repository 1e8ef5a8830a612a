"""How the workers of one generation exchange data.

group.py            the workers of a generation: exchanges, collectives, point-to-point messages
pending.py          transfers under way, and waiting for them
background.py       reduces buckets while backward runs
shared_memory.py    the transport among workers of one machine: peer_listener.py connects them, peer_link.py is one
                    connection, shared_region.py the memory they share
backend.py          decides the order of addition and the backend that carries gradients
"""
