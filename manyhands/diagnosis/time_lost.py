"""Where the workers' time goes that is no computation, and which process is the cause.

In a step that workers make together, T is its time and o_i the own time of worker i: what it spends on its data, its
passes, updates and the script. The others wait for the slowest, so o_max − median(o) of T is lost to it. What is waited
for beyond that is lost to servers, if one of them is busy, or else to the network, where bytes go over one.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.diagnosis.evidence import PARTS, ServerEvidence, StepSums
from manyhands.diagnosis.finding import Finding

LEAST_STEPS = 8
LEAST_EXCESS = 0.12  # of the others' own time, before a worker counts as slow
LEAST_SHARE = 0.08  # of the workers' time, before it is worth a sentence
SURE = 4.0  # standard errors between a slow worker and the others
OF_HOST = 0.6  # the slowest of a slow host's workers may be slower than the rest of it by this part of the difference
BUSY_SERVER = 0.6
LEAST_EXCESS_S = 0.001
SHORT_STEP_S, MOST_OF_TIME = 0.004, 0.5
PART_OF_TIME = 0.2  # from which a part other than computation is what the workers are bound by

_DOES = {
    "input": "waits for its data",
    "forward": "is slow in its forward pass",
    "backward": "is slow in its backward pass",
    "update": "is slow in its updates",
    "outside": "is slow between its steps, in the script itself",
}
_TRY = {
    "input": "look at how that worker reads its samples: its disk, its transforms, its cores",
    "forward": "look at its cores (slower, shared, too few threads) and at longer inputs in its batches",
    "backward": "look at its cores (slower, shared, too few threads) and at hooks that do more there",
    "update": "look whether its host swaps, or its optimizer has more to update than the others'",
    "outside": "look at what its script does between two steps: printing, saving, measuring",
}


@dataclass(frozen=True)
class WorkersSeen:
    """The workers with enough steps to tell, by number."""

    sums: Mapping[int, StepSums]
    host_of: Mapping[int, int]
    lockstep: bool

    @property
    def wall_s(self) -> float:
        return statistics.mean(one.wall / one.steps for one in self.sums.values())

    @property
    def waiting(self) -> float:
        """Which part of its time a worker waits, in the middle of them."""
        return statistics.median(one.waiting / one.wall for one in self.sums.values())

    def without(self, worker: int) -> list[StepSums]:
        return [one for number, one in self.sums.items() if number != worker]

    def share(self, part: str) -> float:
        return statistics.median(one.parts[part] / one.wall for one in self.sums.values())


def time_lost(seen: WorkersSeen, servers: Mapping[str, ServerEvidence]) -> list[Finding]:
    """All that costs time, in no order."""
    if not seen.sums:
        return []
    slow = _uneven_host(seen) or _slow_worker(seen)
    if short := _short_steps(seen):
        return [slow, short] if slow else [short]
    found = [slow, _input_bound(seen, slow), _update_bound(seen), _outside_bound(seen, slow)]
    lost = slow.numbers["waited_s"] / seen.wall_s if slow else 0.0
    found.append(_waited_for(seen, servers, max(0.0, seen.waiting - lost)))
    return [one for one in found if one is not None]


def _short_steps(seen: WorkersSeen) -> Finding | None:
    """What a step costs beside its computation is part of a millisecond: it matters where there is little else."""
    computes = seen.share("forward") + seen.share("backward")
    if seen.wall_s > SHORT_STEP_S or computes > MOST_OF_TIME:
        return None
    return Finding(
        kind="short-steps",
        text=f"a step takes {_ms(seen.wall_s)}, of which {_percent(computes)} is computation, and the rest is what "
        "every step costs",
        advice="use a larger batch, or fewer workers for so small a model",
        share=1 - computes,
        numbers={"step_s": seen.wall_s, "computes": computes},
    )


def _slow_worker(seen: WorkersSeen) -> Finding | None:
    if len(seen.sums) < 2:
        return None
    worker = max(seen.sums, key=lambda number: seen.sums[number].own_s)
    slowest, others = seen.sums[worker], seen.without(worker)
    usual_s = statistics.median(one.own_s for one in others)
    error_s = max(slowest.own_error_s, statistics.median(one.own_error_s for one in others))
    excess_s = slowest.own_s - usual_s
    if excess_s < max(LEAST_EXCESS * usual_s, LEAST_EXCESS_S, SURE * error_s):
        return None
    waited_s = statistics.median(one.waiting / one.steps for one in others)
    is_waited_for = seen.lockstep or waited_s > excess_s / 2
    share = min(1.0, excess_s / seen.wall_s) if is_waited_for else excess_s / slowest.own_s / len(seen.sums)
    if share < LEAST_SHARE:
        return None
    part, own_s, theirs_s = _cause(slowest, others)
    they = "the others" if len(others) > 1 else "the other"
    text = f"worker {worker} {_DOES[part]} ({_compared(own_s, theirs_s, they)})"
    return Finding(
        kind="input-bound" if part == "input" else "slow-worker",
        text=f"{text}, {_consequence(share, they, slowest, is_waited_for=is_waited_for)}",
        advice=_TRY[part]
        + ", or use a strategy in which workers do not wait for each other"
        * (is_waited_for and part != "input"),
        share=share,
        processes=(f"worker {worker}",),
        numbers={
            "own_s": own_s,
            "others_s": theirs_s,
            "excess_s": excess_s,
            "waited_s": excess_s * is_waited_for,
        },
    )


def _cause(slowest: StepSums, others: Sequence[StepSums]) -> tuple[str, float, float]:
    """The part of a step that makes it slow, its seconds, and those of the others."""
    usual = {part: statistics.median(one.part_s(part) for one in others) for part in PARTS}
    part = max(PARTS, key=lambda name: slowest.part_s(name) - usual[name])
    return part, slowest.part_s(part), usual[part]


def _compared(own_s: float, theirs_s: float, they: str) -> str:
    more = own_s / theirs_s - 1 if theirs_s > 0 else float("inf")
    percent = f"+{more:.0%}, ".replace("%", " %") if more < 9.995 else ""
    return f"{percent}{_ms(own_s)} a step, {they} {_ms(theirs_s)}"


def _consequence(share: float, they: str, slowest: StepSums, *, is_waited_for: bool) -> str:
    if is_waited_for:
        return f"{they} wait{'' if they.endswith('s') else 's'} for it {_percent(share)} of the time"
    return f"and makes {1 / slowest.own_s:.3g} steps a second; {they} need not wait for it"


def _uneven_host(seen: WorkersSeen) -> Finding | None:
    """All workers of one host are slower than those of the others, in all that they compute."""
    hosts = sorted({seen.host_of.get(number, 0) for number in seen.sums})
    if len(hosts) < 2:
        return None
    own_s = {host: statistics.median(one.own_s for one in _of_host(seen, host)) for host in hosts}
    slow = max(hosts, key=lambda host: own_s[host])
    theirs = [one for number, one in seen.sums.items() if seen.host_of.get(number, 0) != slow]
    usual_s = statistics.median(one.own_s for one in theirs)
    excess_s = own_s[slow] - usual_s
    mine = _of_host(seen, slow)
    if len(mine) < 2 and not _is_slow_in_all(mine[0], theirs):
        return None
    if excess_s < LEAST_EXCESS * usual_s or min(one.own_s for one in mine) < usual_s + OF_HOST * excess_s:
        return None
    error_s = max(max(one.own_error_s for one in mine), statistics.median(one.own_error_s for one in theirs))
    share = min(1.0, excess_s / seen.wall_s) if seen.lockstep else 0.0
    if excess_s < SURE * error_s or (seen.lockstep and share < LEAST_SHARE):
        return None
    who = f"the workers of host {slow} need" if len(mine) > 1 else f"the worker of host {slow} needs"
    waits = f", and the other hosts wait for it {_percent(share)} of the time" if seen.lockstep else ""
    return Finding(
        kind="uneven-hosts",
        text=f"{who} {own_s[slow] / usual_s:.2g} times as long for a step as those of other hosts "
        f"({_compared(own_s[slow], usual_s, 'the others')}){waits}",
        advice="give that host fewer workers or smaller batches, or use a strategy in which hosts do not wait",
        share=share,
        processes=(f"host {slow}",),
        numbers={
            "own_s": own_s[slow],
            "others_s": usual_s,
            "excess_s": excess_s,
            "waited_s": excess_s * seen.lockstep,
        },
    )


def _of_host(seen: WorkersSeen, host: int) -> list[StepSums]:
    return [one for number, one in seen.sums.items() if seen.host_of.get(number, 0) == host]


def _is_slow_in_all(one: StepSums, others: Sequence[StepSums]) -> bool:
    """Whether a single worker's forward and backward passes are slower alike, as they are on a slower machine."""
    ratios = []
    for part in ("forward", "backward"):
        usual_s = statistics.median(other.part_s(part) for other in others)
        ratios.append(one.part_s(part) / usual_s if usual_s > 0 else 0.0)
    return min(ratios) > 1 + LEAST_EXCESS and max(ratios) - 1 < 3 * (min(ratios) - 1)


def _input_bound(seen: WorkersSeen, slow: Finding | None) -> Finding | None:
    share = seen.share("input")
    if share < PART_OF_TIME or (slow is not None and slow.kind == "input-bound"):
        return None
    seconds = statistics.median(one.part_s("input") for one in seen.sums.values())
    return Finding(
        kind="input-bound",
        text=f"the workers wait for their data {_percent(share)} of the time ({_ms(seconds)} a step)",
        advice="load faster: a DataLoader with more num_workers, cheaper transforms, data prepared once, a faster disk",
        share=share,
        processes=tuple(f"worker {number}" for number in sorted(seen.sums)),
        numbers={"input_s": seconds},
    )


def _update_bound(seen: WorkersSeen) -> Finding | None:
    share = seen.share("update")
    if share < PART_OF_TIME:
        return None
    seconds = statistics.median(one.part_s("update") for one in seen.sums.values())
    return Finding(
        kind="update-bound",
        text=f"the optimizer takes {_percent(share)} of the time ({_ms(seconds)} a step)",
        advice="make fewer updates of more samples: a larger batch, or several batches to a step",
        share=share,
        numbers={"update_s": seconds},
    )


def _outside_bound(seen: WorkersSeen, slow: Finding | None) -> Finding | None:
    share = seen.share("outside")
    if share < PART_OF_TIME or (slow is not None and "between its steps" in slow.text):
        return None
    seconds = statistics.median(one.part_s("outside") for one in seen.sums.values())
    return Finding(
        kind="script-bound",
        text=f"{_percent(share)} of the time goes by between steps, in the script itself ({_ms(seconds)} a step)",
        advice="look at what the script does there: it may load its batches itself (session.batches loads ahead), "
        "print, or measure",
        share=share,
        numbers={"outside_s": seconds},
    )


def _waited_for(seen: WorkersSeen, servers: Mapping[str, ServerEvidence], share: float) -> Finding | None:
    """What workers wait for, beyond the slowest of them."""
    if share < PART_OF_TIME or (len(seen.sums) < 2 and not servers):
        return None
    busy = {name: one.busy() for name, one in servers.items()}
    name = max(busy, key=lambda one: busy[one][0], default="")
    if name and busy[name][0] >= BUSY_SERVER:
        return _server_bound(name, busy, share)
    sent = [one.sent_bytes / one.wall for one in seen.sums.values()]
    if not any(sent):
        return _server_bound(name, busy, share) if name else None
    rate = statistics.mean(sent)
    return Finding(
        kind="network-bound",
        text=f"the workers wait for the network {_percent(share)} of the time, each sending "
        f"{rate / 1e6:.3g} MB/s ({8 * rate / 1e6:.3g} Mbit/s)",
        advice="send less often or more at once: a strategy that averages every few steps, a larger batch, several "
        "batches to a step; or use a faster link",
        share=share,
        processes=tuple(sorted({f"host {host}" for host in seen.host_of.values()})),
        numbers={"sent_bytes_per_s": rate},
    )


def _server_bound(name: str, busy: Mapping[str, tuple[float, float]], share: float) -> Finding:
    works, updates = busy[name]
    others = [one[0] for other, one in busy.items() if other != name]
    beside = f", the others {_percent(statistics.mean(others))}" if others else ""
    least = min((one[0] for one in busy.values()), default=0.0)
    is_alone = bool(others) and works > 1.5 * least
    return Finding(
        kind="server-bound",
        text=f"the workers wait for servers {_percent(share)} of the time: {name} is busy {_percent(works)} of it"
        f"{beside} ({_percent(updates)} in the optimizer)",
        advice="look at what else uses its cores, since the others have less to do"
        if is_alone
        else "use more --servers, or a larger batch, so that each gradient is worth more computation",
        share=share,
        processes=(name,),
        numbers={"busy": works, "updating": updates},
    )


def _ms(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2g} ms"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
