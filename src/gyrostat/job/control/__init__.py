"""Controls one job: coordinator, leader, requests and replies, restarts, outcome and report."""
