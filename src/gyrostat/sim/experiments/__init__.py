"""Reproductions of the papers' experiments: one module each, found by name, run by `gyrostat experiment NAME`.

A module of this package has a `run(context)` that returns an `ExperimentFinding`: the setup, the paper's
figures and ours, why they differ, tables and plots. `registry` lists them, `page` writes `docs/results.md`, `svg` draws.
"""
