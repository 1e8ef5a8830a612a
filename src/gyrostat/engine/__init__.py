"""Inside one worker: virtual workers, their contexts, the reduction, the step, checkpoints."""
