"""What decides bits besides the script: levels of determinism, the fingerprint, the probe."""
