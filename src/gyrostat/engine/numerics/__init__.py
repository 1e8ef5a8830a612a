"""What decides bits besides the script: determinism levels, fingerprint, probe."""
