"""A cluster on virtual time: the same loop, tick and policies as everywhere, months of a trace in seconds."""
