"""Frozen value types that every room shares. Standard library only."""
