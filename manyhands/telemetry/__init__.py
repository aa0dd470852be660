"""Events and counters, written by the primitives themselves; everything that displays only reads them.

One recorder per process, one JSONL file per process: `events/worker-<rank>.jsonl` in the run's directory.
Nothing here blocks or raises into training, and nothing here imports torch. Each line has at least

    kind   "start", "step", "evaluate", "checkpoint", "process", "end", ...
    t      unix time in seconds
    rank   the worker that wrote it

A "step" line adds step, epoch, loss, samples and what was counted since the step before it: `compute_s`,
`wait_s`, `exchange_s`, `update_s`, `bytes_sent`, `bytes_received`, ... Of `compute_s`, `forward_s` is the forward
pass, and `held_s` (in `wait_s` as well) is what the worker waited for others in the middle of it; `input_s` is how
long the script waited for its batch. A "process" line, about one a second, has `cpu_percent` (of one core),
`memory_bytes` (resident) and `threads`. An "evaluate" line has step, epoch, `accuracy` (0 to 1, where it makes
sense) and loss. A "start" line has total_steps (null when unknown), epochs, workers, batch, model, data and strategy;
that of a session has the learning `rate` and how many updates `late` its strategy expects gradients to be. A "log"
line has the step and the `values` that a script has logged, by name. A "checkpoint" line has the step and
`stopped_s`, for how long training stood still; worker 0's "saved" line says that it is on the disk, `seconds` later.

A server writes `events/server-<i>.jsonl`: a "serves" line has `i`; its "updates" lines have `staleness` and `leads`,
each value with how often it occurred since the last such line; "serving" lines have for how many seconds since its
start the server has waited for messages (`wait_s`) and run the optimizer (`update_s`); a "dropped" line says why
something that came over the network was not a message, and a "listens" line at which `port` its process `pid` takes
connections that prove a key of the run.

The launcher of each host (or its first worker, where another launcher has started it) writes
`events/host-<number>.jsonl`: a "usage" line a second, whose `rank` is the host's number, with what `host_usage.py`
reads. Its counters only grow, as those of the kernel do; a rate is a difference.
"""

from manyhands.telemetry.recorder import (
    accompany,
    add_seconds,
    close,
    computing,
    count,
    count_processor_time,
    event,
    open,
    step,
    timed,
    totals,
)

__all__ = [
    "accompany",
    "add_seconds",
    "close",
    "computing",
    "count",
    "count_processor_time",
    "event",
    "open",
    "step",
    "timed",
    "totals",
]
