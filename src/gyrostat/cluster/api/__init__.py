"""The REST API of a cluster: all cluster verbs of the command line go through it.

A request comes through a connection (`connections`), passes `guard` (is it meant for this service?), `tokens` (who sends it?)
and `admission` (how many of this tenant's are in progress?), is decoded by `operation` into the struct that its operation
takes, and is answered by a function of `operations`, which calls the `ClusterService`. `openapi` describes the same table of
operations, so the document and the service agree. `problem` is the form of errors, `metrics` is for Prometheus, `server`
listens.
"""
