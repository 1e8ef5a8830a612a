"""Whether two machines compute alike: many small operators on fixed inputs, and digests of what comes out.

`operators` has the operators, `run` runs them, `result` is what they gave and compares two of it. Only the first two import
torch.
"""
