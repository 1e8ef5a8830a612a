"""The REST API of a cluster: everything that the command line does goes through it.

A request passes `guard` (is it meant for us, and small enough?) and `tokens` (whose is it?), is read by `operation` into
the struct that its operation takes, and is answered by one of the functions in `operations`, which ask the `Office`. The
table of operations is also what `openapi` describes, so that the document and the service cannot differ. `problem` is how
refusals are told, `tail` reads logs, `metrics` is for Prometheus, `server` listens.
"""
