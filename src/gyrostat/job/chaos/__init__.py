"""Random faults on the user's own job, and a verdict: `plan` says which, `play` inflicts them on real processes, `record` is
what workers themselves note of their steps (`inside`), and `verdict` compares that with a run that was left alone."""
