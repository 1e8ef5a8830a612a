"""Which samples a virtual worker sees, and in which order. A pure function of the job, never of the placement."""
