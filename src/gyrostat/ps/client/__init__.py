"""The workers' side of parameter servers, without torch.

port     `ParameterServers`: what a training script's side (`ps/script`) needs
local    it, with one server and the shard queues in this process: a plain `python train.py`
remote   it, over sockets: servers and the job's leader are other processes
"""
