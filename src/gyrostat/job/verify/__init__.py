"""`gyrostat verify`: a script must give the same bits on several placements, across save and resume, and as plain DDP. If it
does not, the first step and tensor that differ are located, and known causes are reported.

    plan       which configurations to run; pure
    trace      the losses and digests of a run; pure
    compare    the first difference of two traces, and which pairs are worth explaining; pure
    suspects   lines of a script that are known to break reproducibility; pure (`loopcode`: those in loops)
    diagnosis  from evidence to likely causes; pure (`causes` has their texts)
    verdict    the result, and its report
    sources    reads the script and the modules that it imports from its directory
    execution  runs one configuration
    verifier   runs all configurations, locates the first difference, gathers the evidence
"""
