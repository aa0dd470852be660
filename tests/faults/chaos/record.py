"""What a run must show afterwards, and what is written down of it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.summaries import Findings, Measured
from tests.faults import checks
from tests.faults.chaos.attacks import DEADLY, AnyRan, training
from tests.faults.chaos.setups import SetUp


def check(setup: SetUp, ran: AnyRan) -> None:
    """Every worker that made a step and was not killed has finished, in the process in which it began; the ledger is
    exact; all have the same parameters, and those of one process where that is promised."""
    settings = training(setup)
    lost = sorted(set(should_finish(ran)) - set(ran.ends))
    assert not lost, f"workers {lost} were not killed and have not finished"
    assert ran.ends, "no worker has finished"
    checks.nothing_lost(ran, ran.fired, ran.fired, epochs=settings["epochs"])
    checks.learned(setup.strategy, ran, settings["optimizer"], lr=settings["lr"], epochs=settings["epochs"])


def should_finish(ran: AnyRan) -> list[int]:
    """The workers that have made a step and that no fault has killed."""
    return [
        number
        for number, log in sorted(ran.logs.items())
        if log[0]["pid"] not in ran.killed and any(row["kind"] == "made" for row in log)
    ]


def deaths(ran: AnyRan) -> list[str]:
    """The kind of every fault that ended a process; a host counts once."""
    return [fault.kind for fault in ran.fired if fault.kind in DEADLY]


def record(setup: SetUp, seed: int, ran: AnyRan, faults: Sequence[Any], seconds: float) -> dict[str, Any]:
    """One run, for a person who wants to see who was killed and who went on."""
    return {
        "seed": seed,
        "set-up": str(setup),
        "where": setup.where,
        "faults": [str(fault) for fault in faults],
        "fired": [str(fault) for fault in ran.fired],
        "kinds": [fault.kind for fault in ran.fired],
        "deaths": len(deaths(ran)),
        "killed": ran.killed,
        "should have finished": should_finish(ran),
        "process ids": {
            number: [log[0]["pid"], ran.ends[number]["pid"] if number in ran.ends else None]
            for number, log in sorted(ran.logs.items())
        },
        "noticed after, s": noticed(ran),
        "seconds": seconds,
    }


def noticed(ran: AnyRan) -> list[float]:
    found = [*ran.fields_of("death"), *ran.fields_of("host")]
    return [float(fields["noticed_s"]) for fields in found if "noticed_s" in fields]


def findings(records: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]]) -> Findings:
    kinds = Counter(kind for one in records for kind in one["kinds"])
    where = Counter[str]()
    for one in records:
        where[one["where"]] += one["deaths"]
    return Findings(
        title="kills and other faults at random instants, over what is registered",
        counts={
            "runs": len(records) + len(failed),
            "kept": len(records),
            "set-ups": len({one["set-up"] for one in records}),
            "deaths": sum(where.values()),
            **{f"deaths, {place}": count for place, count in sorted(where.items())},
            **dict(sorted(kinds.items())),
        },
        notes=[f"seed {one['seed']}, {one['set-up']}: {one['error']}" for one in failed[:12]],
        measured=[
            Measured(
                of="a death, until another process tells of it",
                unit="s",
                values={"noticed": [each for one in records for each in one["noticed after, s"]]},
            ),
        ],
    )


def error_line(error: BaseException, folder: Path) -> str:
    """The first line of what went wrong, without where the run lay."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].replace(str(folder), "…")[:300]
