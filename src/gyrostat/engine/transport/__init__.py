"""How workers of one generation exchange data: groups, shared memory, background reduction."""
