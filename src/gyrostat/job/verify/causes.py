"""What is known to make runs differ that should be equal, and what to do about each. The words only: which of
them fit is decided in `diagnosis`.
"""

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
    """Which lines of a script speak for it."""


KNOWN: dict[Key, Known] = {
    Key.UNSEEDED_RNG: Known(
        "random numbers from a source that gyrostat does not seed: the system's entropy, a generator made without "
        "a seed or seeded by the clock, or a draw before gyrostat.init",
        "draw from torch, NumPy's or Python's global generators after gyrostat.init(seed=…), or give the generator a "
        "fixed seed",
        (Hint.UNSEEDED, Hint.CLOCK),
    ),
    Key.THREADS: Known(
        "several threads: some operators add in the order in which their threads happen to finish",
        "use --threads 1, the default, and more workers instead; or torch.use_deterministic_algorithms(True)",
    ),
    Key.HASH_SEED: Known(
        "PYTHONHASHSEED is not fixed, so sets of strings have another order in every process",
        "unset PYTHONHASHSEED (gyrostat then fixes it), or sort the sets",
    ),
    Key.OUTSIDE_WORLD: Known(
        "something outside the job: the clock, a file that an earlier run changed, the network, threads of the script",
        "let updates depend on nothing but the data and the seed; write outputs to where they are not read again",
        (Hint.CLOCK,),
    ),
    Key.UNTRACKED_SCHEDULE: Known(
        "only the optimizer's settings differ: a schedule that is not tracked begins anew when the job is resumed",
        "track it: job.track(…, schedule=schedule)",
    ),
    Key.UNTRACKED_STATE: Known(
        "state that is not tracked, and so begins anew when the job is resumed: a variable of the script, an "
        "attribute of a module or dataset that is not a buffer, an object that is missing in job.track",
        "give it to job.track (anything with state_dict and load_state_dict), keep plain values in job.state, "
        "or make it a buffer of the module (register_buffer)",
        (Hint.HELD_STATE,),
    ),
    Key.COUNTER: Known(
        "a counter of the script's own, which begins at 0 again when the job is resumed in the middle of an epoch",
        "use job.step and job.epoch, or keep the count in job.state",
        (Hint.COUNTER,),
    ),
    Key.GENERATOR_NOT_SAVED: Known(
        "a generator of the script's own: checkpoints hold the global streams of torch, NumPy and Python, not this one",
        "draw from the global streams, which gyrostat saves; or keep the generator's state in job.state",
        (Hint.OWN_GENERATOR,),
    ),
    Key.SHARED_STREAM: Known(
        "one random stream used by all virtual workers of a worker: a generator of the script's, model's or dataset's "
        "own is drawn from inside micro-batches, so who draws what depends on who runs where",
        "inside micro-batches draw from the global streams of torch, NumPy or random: gyrostat gives every virtual "
        "worker its own",
        (Hint.OWN_GENERATOR,),
    ),
    Key.SHARED_OBJECT: Known(
        "an object with state that all virtual workers of a worker share: an attribute that a dataset or a module "
        "changes in every micro-batch, a counter, a cache",
        "keep what belongs to a virtual worker in step.local, make what belongs to the model a buffer "
        "(register_buffer), and let a sample depend on its index only",
        (Hint.HELD_STATE,),
    ),
    Key.LOCAL_VALUE: Known(
        "a value of one virtual worker decides something outside the inner loop, such as the loss of the last "
        "micro-batch: which one that is depends on the worker",
        "use job.mean(value), which is the same on all workers",
        (Hint.LOCAL_VALUE,),
    ),
    Key.WORKER_CODE: Known(
        "code that asks which worker it runs in, or how many there are: job.is_main, RANK, WORLD_SIZE, the process id",
        "use job.virtual_workers and step.virtual_rank, which do not depend on the placement; under job.is_main only "
        "print and write",
        (Hint.WORKER,),
    ),
    Key.STEP_COUNT: Known(
        "the number of steps depends on how the job runs: a limit by time, or a stop by a value of one virtual worker",
        "decide by job.step, or by job.mean(…), which is the same on all workers",
        (Hint.CLOCK, Hint.WORKER),
    ),
    Key.NOT_THROUGH_MODULE: Known(
        "the tracked module is not called as module(…): DDP acts only in that call, so a method of the module, or a "
        "part of it, used directly trains without averaging gradients in plain DDP, while gyrostat averages them",
        "call the tracked module itself, and branch inside its forward; or leave plain DDP out: --against none",
        (Hint.DIRECT_CALL,),
    ),
    Key.COMPILE: Known(
        "torch.compile: under DDP it splits graphs at bucket borders, and other kernels may give other bits",
        "set torch._dynamo.config.optimize_ddp = False, or verify the script without torch.compile",
        (Hint.COMPILE,),
    ),
}
