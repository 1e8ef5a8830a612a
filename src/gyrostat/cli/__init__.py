"""The command line: one file per verb, listed in `verbs`. The only room that wires others together."""
