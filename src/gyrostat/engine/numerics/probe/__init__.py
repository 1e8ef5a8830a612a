"""Whether two machines compute the same bits: many small operators on fixed inputs, and digests of their results.

`operators.py` has the operators, `run.py` runs them, `result.py` compares the digests of two machines. Only the first two
import torch.
"""
