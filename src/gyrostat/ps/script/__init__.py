"""What a training script touches: `gyrostat.servers`, tables, dense parameters, the loop. The only part that imports torch."""
