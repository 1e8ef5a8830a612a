"""The known causes of a difference between runs, and what to do about each. `diagnosis` decides which of them fit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gyrostat.job.verify.suspects import Hint


class Key(StrEnum):
    UNSEEDED_RNG = "unseeded-rng"
    THREADS = "threads"
    HASH_SEED = "hash-seed"
    OUTSIDE_WORLD = "outside-world"
    UNTRACKED_SCHEDULE = "untracked-schedule"
    UNTRACKED_STATE = "untracked-state"
    COUNTER = "counter"
    GENERATOR_NOT_SAVED = "generator-not-saved"
    SHARED_STREAM = "shared-stream"
    SHARED_OBJECT = "shared-object"
    LOCAL_VALUE = "local-value"
    WORKER_CODE = "worker-code"
    STEP_COUNT = "step-count"
    NOT_THROUGH_MODULE = "not-through-module"
    COMPILE = "compile"


@dataclass(frozen=True)
class Known:
    """A known cause."""

    says: str
    do: str
    hints: tuple[Hint, ...] = ()
    """The hints that support it."""


KNOWN: dict[Key, Known] = {
    Key.UNSEEDED_RNG: Known(
        "random numbers from a source that gyrostat does not seed: the system's entropy, a generator made without "
        "a seed or seeded by the clock, or a draw before gyrostat.init",
        "draw from torch, NumPy's or Python's global generators after gyrostat.init(seed=…), or give the generator a "
        "fixed seed",
        (Hint.UNSEEDED, Hint.CLOCK),
    ),
    Key.THREADS: Known(
        "several threads: some operators add in the order in which their threads finish",
        "use --threads 1, the default, and more workers instead; or torch.use_deterministic_algorithms(True)",
    ),
    Key.HASH_SEED: Known(
        "PYTHONHASHSEED is not fixed, so the order of sets of strings differs between processes",
        "unset PYTHONHASHSEED (gyrostat then fixes it), or sort the sets",
    ),
    Key.OUTSIDE_WORLD: Known(
        "something outside the job: the clock, a file that an earlier run changed, the network, threads of the script",
        "make updates depend only on the data and the seed; write outputs to files that no run reads",
        (Hint.CLOCK,),
    ),
    Key.UNTRACKED_SCHEDULE: Known(
        "only the optimizer's settings differ: a schedule that is not tracked restarts when the job is resumed",
        "track it: job.track(…, schedule=schedule)",
    ),
    Key.UNTRACKED_STATE: Known(
        "state that is not tracked, and so is reset when the job is resumed: a variable of the script, an "
        "attribute of a module or dataset that is not a buffer, an object that is missing in job.track",
        "give it to job.track (anything with state_dict and load_state_dict), keep plain values in job.state, "
        "or make it a buffer of the module (register_buffer)",
        (Hint.HELD_STATE,),
    ),
    Key.COUNTER: Known(
        "a counter of the script, which restarts at 0 when the job is resumed in the middle of an epoch",
        "use job.step and job.epoch, or keep the count in job.state",
        (Hint.COUNTER,),
    ),
    Key.GENERATOR_NOT_SAVED: Known(
        "a random generator of the script: checkpoints hold the global streams of torch, NumPy and Python, not this one",
        "draw from the global streams, which gyrostat saves; or keep the generator's state in job.state",
        (Hint.OWN_GENERATOR,),
    ),
    Key.SHARED_STREAM: Known(
        "one random stream shared by all virtual workers of a worker: micro-batches draw from a generator of the script, "
        "model or dataset, so the numbers that a virtual worker draws depend on the placement",
        "inside micro-batches draw from the global streams of torch, NumPy or random: gyrostat gives every virtual "
        "worker its own",
        (Hint.OWN_GENERATOR,),
    ),
    Key.SHARED_OBJECT: Known(
        "an object with state that all virtual workers of a worker share: an attribute that a dataset or a module "
        "changes in every micro-batch, a counter, a cache",
        "keep state of a virtual worker in step.local, make state of the model a buffer (register_buffer), and make a "
        "sample depend only on its index",
        (Hint.HELD_STATE,),
    ),
    Key.LOCAL_VALUE: Known(
        "a value of one virtual worker decides something outside the inner loop, such as the loss of the last "
        "micro-batch: which one that is depends on the worker",
        "use job.mean(value), which is the same on all workers",
        (Hint.LOCAL_VALUE,),
    ),
    Key.WORKER_CODE: Known(
        "code that depends on its worker, or on the number of workers: job.is_main, RANK, WORLD_SIZE, the process id",
        "use job.virtual_workers and step.virtual_rank, which do not depend on the placement; under job.is_main only "
        "print and write files",
        (Hint.WORKER,),
    ),
    Key.STEP_COUNT: Known(
        "the number of steps depends on the run: a time limit, or a stop that depends on a value of one virtual worker",
        "decide by job.step or job.mean(…), which are the same on all workers",
        (Hint.CLOCK, Hint.WORKER),
    ),
    Key.NOT_THROUGH_MODULE: Known(
        "the tracked module is not called as module(…): DDP works only in that call, so with plain DDP a method or "
        "a submodule that is called directly trains without averaged gradients, while gyrostat averages them",
        "call the tracked module itself, and branch inside its forward; or omit plain DDP: --against none",
        (Hint.DIRECT_CALL,),
    ),
    Key.COMPILE: Known(
        "torch.compile: under DDP it splits graphs at bucket boundaries, and different kernels may give different bits",
        "set torch._dynamo.config.optimize_ddp = False, or verify the script without torch.compile",
        (Hint.COMPILE,),
    ),
}
