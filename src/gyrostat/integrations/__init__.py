"""Other people's training loops on gyrostat: Hugging Face's Trainer, Lightning, Accelerate.

Each module needs its framework (extras `transformers`, `lightning`, `accelerate`) and is imported by its full name only. The
framework keeps its loop; the module gives it one item per step, and runs the step's micro-batches where the framework runs one.
"""
