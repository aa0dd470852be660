"""Measure one host with one job: which split of its cores is fastest, and what the price of anything else needs.

Every split of the cores is alive at once as a run of its own, with the job's own command, and takes turns
(`splits.py`); the rounds decide when enough is known (`manyhands.lab.rounds`). One split's first worker is also
looked into: gradients' readiness, layers, memory, reference kernels.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from manyhands.comm.transports.free_memory import available_bytes
from manyhands.errors import ManyhandsError
from manyhands.lab.rounds import PairedRounds, RoundLimits, RoundsEnd, RoundsVerdict, noise
from manyhands.lab.taking_turns import Answer, ContenderLost
from manyhands.planner import fitted, splits
from manyhands.planner.facts import HostFacts, KernelPair, LayerFacts, ModelFacts
from manyhands.planner.splits import DividedHost, Split

ROUNDS_S = 9.0
"""For the turns alone: starting takes about as long again."""
_PROCESS_BYTES = 400e6
_WATCHED_STEPS = 4

Report = Callable[[str, int, int | None], None]
"""What is being done, how much of it, of how much."""


@dataclass(frozen=True, kw_only=True)
class ProbedJob:
    """What is measured."""

    name: str
    """Of the model or script, for people."""
    command: Callable[[Split, str], Sequence[str]]
    """What the workers of a split run under a strategy."""
    known_by: Mapping[str, object]
    """By what its measurements are known again."""
    epochs: int | None = None
    """How many it asks for, where that is known: not measured, but what a person wants the time of."""


class HostProbe(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    host: HostFacts
    model: ModelFacts
    batch: int
    indistinct: float
    """By how much the same split differed from itself in the same rounds (A/A)."""
    chosen: str
    """The split to use, as `2 × 1`."""
    verdict: str
    """Why the rounds ended, for people."""
    step_s: dict[str, float]
    """Wall seconds per sample of each split, workers pooling their gradients: medians of its turns."""
    rounds: int
    took_s: float
    made_at: float
    """Unix time."""
    notes: tuple[str, ...] = ()


def probe_host(
    job: ProbedJob,
    *,
    workers: int | None = None,
    threads: int | None = None,
    seconds: float | None = None,
    report: Report = lambda what, done, total: None,
) -> HostProbe:
    """Measure this host; `workers` and `threads` hold those fixed."""
    began_s, seconds = time.monotonic(), seconds or ROUNDS_S
    usable = splits.usable_cores()
    tried = splits.enough_memory(splits.possible(usable, workers, threads), _PROCESS_BYTES)
    with DividedHost(tried, job.command) as host:
        steps = len(tried)
        host.start(lambda name: report(f"starts {name}", [d.name for d in tried].index(name), steps))
        alive = host.alive
        if not alive:
            name, reason = next(iter(host.lost.items()))
            raise ManyhandsError(f"{job.name} runs on none of {steps} splits of this host; {name}: {reason}")
        looked = _look_into(host, alive[-1])
        rounds = PairedRounds(
            alive,
            host.take,
            incumbent=min(alive, key=lambda name: host.seen_s[name]),
            reference=alive[-1],
            limits=RoundLimits(seconds=seconds),
        )
        ends_s = time.monotonic() + seconds

        def on_turn(number: int, name: str) -> None:
            passed_s = seconds - (ends_s - time.monotonic())
            report(f"round {number + 1}: {name}", int(10 * passed_s), int(10 * seconds))

        verdict = rounds.run(on_turn)
        for name in host.alive:
            if int(name.split()[0]) > 1:
                answers = _unless_lost(host, name, {"meet": 1})
                host.measured[name].meetings_s.extend(s for one in answers for s in one["meeting_s"])
        return _assembled(job, host, looked, rounds, verdict, began_s)


def _unless_lost(host: DividedHost, name: str, order: dict[str, Any]) -> list[Answer]:
    try:
        return host.ask(name, order)
    except ContenderLost:
        return []


def _look_into(host: DividedHost, name: str) -> Answer:
    """What one worker knows of model and host; those of its split take the steps with it."""
    memory = host.ask(name, {"look": "memory"})[0]
    host.ask(name, {"watch": True})
    host.steps_of(name, _WATCHED_STEPS)
    seen = host.ask(name, {"watch": False})[0]
    return {
        **seen,
        "memory": memory,
        "half": host.memory_of_half[name][0],
        "kernels": host.ask(name, {"look": "kernels"})[0],
        "state": host.ask(name, {"look": "state"})[0]["state"],
        "batch": host.batch_of(name),
    }


def _assembled(
    job: ProbedJob,
    host: DividedHost,
    looked: Answer,
    rounds: PairedRounds,
    verdict: RoundsVerdict,
    began_s: float,
) -> HostProbe:
    model = _model(job, looked)
    found = [
        fitted.failed(split, host.lost[split.name])
        if split.name in host.lost
        else fitted.fit(
            split,
            host.measured[split.name],
            parameters=model.parameters,
            gradient_bytes=model.bytes,
        )
        for split in host.splits
    ]
    single = next(name for name in reversed([s.name for s in host.splits]) if name in rounds.turns)
    control = noise(verdict.control)
    return HostProbe(
        host=HostFacts(
            kind="this host",
            cores=splits.usable_cores(),
            memory_bytes=available_bytes(),
            kernels=KernelPair(**looked["kernels"]),
            splits=tuple(found),
            step_cpu_s=fitted.step_cost(host.measured[single]),
            process_bytes=max(0, looked["memory"]["before"]["fair"] - model.bytes),
            spread=control,  # a run differs from the probe as two turns of the same split do
        ),
        model=model,
        batch=looked["batch"],
        indistinct=control,
        chosen=verdict.chosen,
        verdict=verdict.ended.value,
        step_s={name: rounds.cost(name) for name in host.alive if rounds.turns[name]},
        rounds=max(len(turns) for turns in rounds.turns.values()),
        took_s=time.monotonic() - began_s,
        made_at=time.time(),
        notes=_notes(verdict, control),
    )


def _notes(verdict: RoundsVerdict, control: float) -> tuple[str, ...]:
    if verdict.ended not in (RoundsEnd.NOISE, RoundsEnd.TIME) or verdict.lead is None:
        return ()
    if verdict.chosen == verdict.best and verdict.lead.low > 1:
        return ()
    return (
        f"this machine is too noisy to tell {verdict.chosen} from others within the time: the same split differed "
        f"from itself by {control:.0%} (A/A), and the best was ahead by {verdict.lead.median - 1:.0%}; "
        "the simplest of them is chosen",
    )


def _model(job: ProbedJob, looked: Answer) -> ModelFacts:
    gradients, state, batch = sum(looked["span_bytes"]), looked["state"], looked["batch"]
    half, peak = looked["half"], looked["memory"]["peak"]
    samples = max(1, batch // 2)
    per_sample = max(0.0, peak - half["peak"]) / max(1, batch - samples)
    resting = half["before"]["resident"] + gradients + state
    return ModelFacts(
        name=job.name,
        parameters=looked["parameters"],
        span_bytes=tuple(looked["span_bytes"]),
        ready=tuple(looked["ready"]),
        forward_share=min(0.95, max(0.05, looked["forward_share"])),
        activation_bytes=max(0.0, half["peak"] - resting - per_sample * samples),
        sample_activation_bytes=per_sample,
        state_bytes=state,
        divisible_optimizer=looked["divisible"],
        layers=tuple(LayerFacts(**layer) for layer in looked["layers"]),
        samples_per_epoch=looked["samples_per_epoch"],
    )
