"""The leader's side: servers, workers and shard queues of one job."""
