"""What a training script touches: init, Job, Step, and its loops."""
