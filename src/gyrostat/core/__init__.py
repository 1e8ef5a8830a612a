"""Frozen value types that all packages share. Standard library only."""
