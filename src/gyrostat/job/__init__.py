"""One job from outside its workers: launcher, agents, leader and coordinator, and the processes that they start."""
