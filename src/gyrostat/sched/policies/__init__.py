"""Policies by name: those of this package, and others through the entry point group `gyrostat.policies`."""

from __future__ import annotations

from gyrostat.sched.policies.registry import find_policy, known_policies

__all__ = ["find_policy", "known_policies"]
