"""The command line, one file per verb. The only room that wires others together."""
