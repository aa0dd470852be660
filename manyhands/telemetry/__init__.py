"""Events and counters, written by the primitives themselves; everything that displays only reads them.

One recorder per process, one JSONL file per process: `events/worker-<rank>.jsonl` in the run's directory.
Nothing here blocks or raises into training, and nothing here imports torch. Each line has at least

    kind   "start", "step", "evaluate", "checkpoint", "process", "end", ...
    t      unix time in seconds
    rank   the worker that wrote it

A "step" line adds step, epoch, loss, samples and what was counted since the step before it: `compute_s`,
`wait_s`, `exchange_s`, `update_s`, `bytes_sent`, `bytes_received`, ... A "process" line, about one a second,
has `cpu_percent` (of one core), `memory_bytes` (resident) and `threads`.
"""

from manyhands.telemetry.recorder import add_seconds, close, count, event, open, step, timed, totals

__all__ = ["add_seconds", "close", "count", "event", "open", "step", "timed", "totals"]
