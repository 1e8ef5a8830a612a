"""The processes of one machine: fork server, workers, worker pool, protocol, output."""
