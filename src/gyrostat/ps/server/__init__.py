"""One server process."""
