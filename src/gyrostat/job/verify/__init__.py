"""`gyrostat verify`: the same script on several placements, across save and resume, and as plain DDP, must
come to the same bits. If it does not, the first step and tensor that differ are found, and what is known to
cause it is said.

    plan       which configurations to run; pure
    trace      what a run left behind that can be compared; pure
    compare    the first difference of two traces, and which pairs are worth explaining; pure
    suspects   lines of a script that are known to break the promise; pure (`loopcode`: those in loops)
    diagnosis  from evidence to likely causes; pure (`causes` has the words)
    verdict    what came of it all, and its report
    sources    reads the script and what it imports from beside it
    execution  runs one configuration
    verifier   runs them all, looks for the first difference, gathers the evidence
"""
