"""Which way is best: price every candidate with its best values, and the best of them over all draws.

What two ways' draws or the A/A figure cannot tell apart is a tie, and of those that tie with the best the simplest is
chosen. By itself the search chooses among ways whose steps equal those of one process; the others are in the table,
since they make more steps and not the same ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from manyhands.errors import UsageError
from manyhands.planner.candidates import WayLimits, ways
from manyhands.planner.facts import Facts
from manyhands.planner.memory_need import misfit
from manyhands.planner.price import Prediction, price
from manyhands.planner.ways import Way

TABLE = 10
REFINED = 48
"""Candidates that are priced over all draws."""

SIMULATED, SIMULATED_WORKERS = 4, 16
"""Ways with servers that are priced by events, and with how many workers at most: a tenth of a second each."""

SURELY = 0.9
"""Of the draws must agree that one way is slower than another."""

TIE = 0.03
"""Ways that differ by less are alike, whatever was measured: the levels of the price agree no better."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a search has found."""

    facts: Facts
    wanted: WayLimits
    best: Prediction
    table: tuple[Prediction, ...]
    """The best of every kind of way, fastest first; `best` is one of them."""
    ties: tuple[Prediction, ...]
    """Those that cannot be told apart from the best."""
    fastest: Prediction
    """Of all ways in which workers meet while they train, also those whose steps differ from one process's."""
    refused: tuple[tuple[Way, str], ...]
    """The fastest ways that do not fit, and why; and splits that cannot run."""
    candidates: int
    considered: tuple[Way, ...] = ()
    """Those that were priced over all draws."""

    @property
    def is_clear(self) -> bool:
        return len(self.ties) == 1


def search(facts: Facts, wanted: WayLimits | None = None) -> Choice:
    """The best way to train this model on these hosts."""
    wanted = wanted or WayLimits()
    fitting, refused, count = [], [], 0
    for way in ways(facts, wanted):
        count += 1
        found = price(facts, way)
        reason = misfit(facts, way, found.memory_bytes)
        if reason:
            refused.append((found.rate, way, reason))
        else:
            fitting.append(found)
    if not fitting:
        raise UsageError(_none(facts, refused))
    fitting.sort(key=lambda each: -each.rate)
    refined = _refined(facts, fitting)
    alike = [each for each in refined if each.way.trains_alike] or refined
    ties = tied(facts, alike)
    best = min(ties, key=lambda each: (each.way.simplicity, -each.rate))
    refused.sort(key=lambda each: -each[0])
    return Choice(
        facts=facts,
        wanted=wanted,
        best=best,
        table=_table(refined, best),
        ties=tuple(ties),
        fastest=next((each for each in refined if each.way.traits.lockstep), refined[0]),
        refused=tuple((way, reason) for _, way, reason in refused[:TABLE]),
        candidates=count,
        considered=tuple(each.way for each in refined),
    )


def _refined(facts: Facts, fitting: list[Prediction]) -> list[Prediction]:
    """Over all draws, and with every event where servers are near the top."""
    found = [price(facts, each.way, draws=True) for each in _to_refine(fitting)]
    found.sort(key=lambda each: -each.rate)
    near = [each for each in found[: 2 * TABLE] if each.way.workers <= SIMULATED_WORKERS]
    served = [each for each in near if each.way.servers][:SIMULATED]
    if served:
        from manyhands.planner.simulation import by_events  # simpy takes a moment to load

        simulated = {each.way: by_events(facts, each) for each in served}
        found = [simulated.get(each.way, each) for each in found]
        found.sort(key=lambda each: -each.rate)
    return found


def tied(facts: Facts, ranked: list[Prediction]) -> list[Prediction]:
    """Those that cannot be told from the first. Ways that were measured apart differ by what was measured: the A/A
    figure says how far that goes. Where both have the same coefficients the draws decide, which they have in common."""
    first = ranked[0]
    coefficients = _coefficients(first.way)
    found = []
    for each in ranked:
        near = TIE if _coefficients(each.way) == coefficients else max(TIE, facts.indistinct)
        if each is first or each.rate >= first.rate * (1 - near) or surely_slower(each, first) < SURELY:
            found.append(each)
    return found


def _coefficients(way: Way) -> tuple[object, ...]:
    """By which measurements a way is priced: those of its splits; and what a sum in a host's memory costs was measured
    by itself, apart from messages and servers."""
    splits = {(host.kind, host.processes, host.threads) for host in way.hosts}
    return splits, way.traits.topology == "native", way.servers > 0


def surely_slower(one: Prediction, other: Prediction) -> float:
    """In how many of the draws one is slower than the other: what both depend on is drawn for both alike."""
    ones = np.atleast_1d(np.asarray(one.step_s)) / one.samples
    others = np.atleast_1d(np.asarray(other.step_s)) / other.samples
    return float(np.mean(ones > others))


def _to_refine(fitting: list[Prediction]) -> list[Prediction]:
    """The fastest, and the fastest of those whose steps equal one process's."""
    alike = [each for each in fitting if each.way.trains_alike][: REFINED // 2]
    chosen = {id(each): each for each in (*alike, *_varied(fitting)[: REFINED - len(alike)])}
    return list(chosen.values())


def _varied(fitting: Iterable[Prediction]) -> list[Prediction]:
    """Of every strategy with its placement the best few layouts."""
    seen: dict[tuple[str, str], int] = {}
    found = []
    for each in fitting:
        key = (each.way.strategy, each.way.placement)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 2:
            found.append(each)
    return found


def _table(refined: list[Prediction], best: Prediction) -> tuple[Prediction, ...]:
    """The fastest layout of each strategy and placement; the chosen way is always there."""
    seen, found = {(best.way.strategy, best.way.placement)}, [best]
    for each in refined:
        key = (each.way.strategy, each.way.placement)
        if key not in seen:
            seen.add(key)
            found.append(each)
    rest = [each for each in refined if each not in found]
    chosen = (found + rest)[:TABLE] if len(found) < TABLE else found[:TABLE]
    return tuple(sorted(chosen, key=lambda each: -each.rate))


def _none(facts: Facts, refused: list[tuple[float, Way, str]]) -> str:
    errors = [split.error for each in facts.cluster.hosts for split in each.host.splits if split.error]
    if refused:
        _, way, reason = min(refused, key=lambda each: max(price(facts, each[1]).memory_bytes.values()))
        return (
            f"no way fits: even {way} {reason}; use a smaller batch than {facts.batch}, a smaller model, or hosts with "
            "more memory"
        )
    if errors:
        return f"no way can run here: {errors[0]}"
    return "no way is left of those asked for: no registered strategy and placement runs on these workers; ask for less"
