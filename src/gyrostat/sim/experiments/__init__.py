"""Experiments of the papers, again: one module each, found by name, run by `gyrostat experiment NAME`.

A module of this package has a `run(context)` that returns a `Finding`: what was simulated, the paper's figures beside ours, why
they differ where they do, tables and plots. `registry` lists them, `page` writes `docs/results.md`, `svg` draws.
"""
