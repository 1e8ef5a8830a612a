"""From one generation to the next: membership, transition, catch-up, handover, recovery."""
