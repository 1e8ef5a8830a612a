"""Which job gets which devices: cells, policies, the intra-job planner, and the one loop. Imports without torch."""
