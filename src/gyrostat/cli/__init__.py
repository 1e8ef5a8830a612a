"""The command line: one file per verb, listed in `verbs`. The only package that wires others together."""
