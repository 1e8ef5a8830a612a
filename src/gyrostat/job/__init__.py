"""One job seen from outside: the fork parent that starts workers, and the launcher that watches them."""
