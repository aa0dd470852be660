"""Everything registered computes what it has always computed: losses and parameters, to the bit.

A refactoring that fails here is none. Where the mathematics is meant to change, `make golden` writes the new curves.
"""

from typing import Any

import pytest

from manyhands.placement import PLACEMENTS
from manyhands.strategies import PRESETS, STRATEGIES
from tests.golden import store
from tests.golden.arithmetic import STEPS
from tests.golden.cases import Case, cases, run

CASES = cases()
KNOWN = store.read()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind} {case}")
def test_it_computes_what_it_always_has(case: Case) -> None:
    want = KNOWN.get(store.key(case))
    assert want is not None, f"{case} has no golden curve; write it with `make golden`"
    got = run(case)
    assert not _first_difference(got["losses"], want["losses"]), f"of {case}"
    assert got["digest"] == want["digest"], f"the losses of {case} are the same, its last parameters are not"


def _first_difference(got: list[list[float]], want: list[list[float]]) -> str:
    assert [len(losses) for losses in got] == [STEPS] * len(want)
    for step in range(STEPS):
        for worker, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            if ours[step].hex() != theirs[step].hex():
                return f"step {step}, worker {worker}: loss {ours[step]!r}, was {theirs[step]!r}"
    return ""


def test_every_strategy_preset_and_placement_has_curves() -> None:
    registered = {("strategies", name) for name in [*STRATEGIES, *PRESETS]}
    registered |= {("placements", name) for name in PLACEMENTS}
    assert {(case.kind, case.text) for case in CASES} >= registered


def test_no_curve_is_left_over() -> None:
    left = sorted(KNOWN.keys() - {store.key(case) for case in CASES})
    assert not left, f"curves of cases that are not run any more: {left}; `make golden` removes them"


def test_every_strategy_is_run_by_one_worker_and_by_several() -> None:
    workers: dict[str, set[int]] = {}
    for case in CASES:
        if case.kind == "strategies":
            workers.setdefault(case.text, set()).add(case.workers)
    # Two groups of workers need two workers, and groups of equal size four instead of three.
    others: dict[str, set[int]] = {"single": {1}, "worker-groups": {2, 4}}
    assert {text: counts for text, counts in workers.items() if counts != {1, 3}} == others


def test_a_curve_shows_a_difference_of_one_bit() -> None:
    curve: dict[str, Any] = next(iter(KNOWN.values()))
    other = [list(losses) for losses in curve["losses"]]
    other[0][STEPS - 1] *= 1 + 2**-52
    assert not _first_difference(curve["losses"], curve["losses"])
    assert _first_difference(other, curve["losses"]).startswith(f"step {STEPS - 1}, worker 0")
