"""A job on several nodes: agents, leader term, node registry, leases."""
