"""A choice in words and numbers: the table, why the first one, what would change it, the terms behind it."""

from dataclasses import dataclass
from typing import Any

from manyhands import placement as placements
from manyhands.planner.changes import changes, second_machine
from manyhands.planner.price import Prediction
from manyhands.planner.search import Choice
from manyhands.planner.walk import TERMS
from manyhands.planner.ways import Way

SAID = {
    "compute": "forward and backward passes",
    "exchange": "sums and messages that no computation hides",
    "waiting": "waiting for slower workers, and for cores",
    "update": "the optimizer, and the strategy's own arithmetic",
    "session": "handshake, commit and records",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way in the table."""

    mark: str
    way: str
    split: str
    rate: str
    time: str
    memory: str
    trains: str


def rows(choice: Choice, epochs: float) -> list[Row]:
    return [_row(choice, each, epochs) for each in choice.table]


def _row(choice: Choice, each: Prediction, epochs: float) -> Row:
    low, high = each.interval()
    way = each.way
    name = way.strategy if way.placement == placements.DEFAULT else f"{way.strategy}, {way.placement}"
    servers = f" + {way.servers} server{'s' if way.servers > 1 else ''}" if way.servers else ""
    is_best = each.way == choice.best.way
    return Row(
        mark="→" if is_best else "=" if any(each.way == tie.way for tie in choice.ties) else "",
        way=name,
        split=" + ".join(map(str, way.hosts)) + servers,
        rate=f"{each.rate:,.0f} ({low:,.0f}–{high:,.0f})",
        time=duration(epoch_s(choice, each, epochs)),
        memory=" + ".join(f"{need / 1e9:.1f} GB" for need in each.memory_bytes.values()),
        trains=trains(way),
    )


def epoch_s(choice: Choice, each: Prediction, epochs: float) -> float:
    return choice.facts.model.samples_per_epoch * epochs / each.rate


def trains(way: Way) -> str:
    """In what its steps differ from those of one process on all samples."""
    traits, period = way.parsed.traits, way.parsed.period
    if traits.synchronous:
        return "as one process"
    if not traits.lockstep:
        return "workers do not wait for each other"
    if traits.pooled:
        return "gradients come late"
    return f"replicas meet every {period} steps" if period > 1 else "replicas differ"


def duration(seconds: float) -> str:
    if not seconds:
        return "–"
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def paragraph(choice: Choice) -> str:
    """Why the first one, and what would change the choice."""
    return " ".join(
        filter(None, (_why(choice), _ties(choice), _faster(choice), _what_if(choice), *_more(choice)))
    )


def _why(choice: Choice) -> str:
    best = choice.best
    shares = {name: seconds / best.seconds for name, seconds in best.terms.items()}
    largest = sorted((share, name) for name, share in shares.items() if name != "compute")[-1]
    said = (
        f"{best.way}: of a step of {best.seconds * 1e3:,.3g} ms {shares['compute']:.0%} is computation; the largest "
        f"rest is {largest[1]} ({largest[0]:.0%}: {SAID[largest[1]]})."
    )
    slower = [each for each in choice.table if each.way.trains_alike and each.rate < best.rate]
    if slower:
        other = slower[0]
        apart = {name: other.terms[name] / other.samples - best.terms[name] / best.samples for name in TERMS}
        name = max(apart, key=lambda each: apart[each])
        said += (
            f" {other.way} would make {other.rate / best.rate:.2f} of it: {name} takes "
            f"{apart[name] * best.samples * 1e3:,.3g} ms more for as many samples."
        )
    return said


def _ties(choice: Choice) -> str:
    if choice.is_clear:
        return ""
    others = [str(each.way) for each in choice.ties if each.way != choice.best.way]
    near = f"{choice.facts.indistinct:.1%}" if choice.facts.indistinct else "what is known"
    more = f" and {len(others) - 2} more" if len(others) > 2 else ""
    return (
        f"It cannot be told apart from {' and '.join(others[:2])}{more} here (the same way differs from itself by "
        f"{near}): the simplest is taken."
    )


def _faster(choice: Choice) -> str:
    best, fastest = choice.best, choice.fastest
    if fastest.way == best.way or fastest.rate < 1.02 * best.rate or fastest.way.trains_alike:
        return ""
    return (
        f"{fastest.way} would make {fastest.rate / best.rate:.2f} times as many samples/s, but its steps are not "
        f"those of one process ({trains(fastest.way)}): compare what both reach before using it."
    )


def _what_if(choice: Choice) -> str:
    found = [
        f"{change.what} ({change.best.way}, {change.ratio:.2f} times as fast)" for change in changes(choice)
    ]
    return f"What would change the choice: {'; '.join(found)}." if found else ""


def _more(choice: Choice) -> list[str]:
    said = []
    for gbit, best, fastest in second_machine(choice):
        ratio = best.rate / choice.best.rate
        advice = "" if ratio >= 1.1 else ": stay on one"
        other = ""
        if fastest.rate > 1.1 * best.rate and not fastest.way.trains_alike:
            other = f", or {fastest.way.strategy} makes {fastest.rate / choice.best.rate:.2f}"
        said.append(
            f"A second machine like this one over {gbit:g} Gbit/s would make {ratio:.2f} of one with "
            f"{best.way.strategy}{advice}{other}."
        )
        if ratio >= 1.8:
            break
    return said


def terms_text(choice: Choice) -> str:
    """The numbers behind each term, for `--explain`."""
    lines = [f"{choice.candidates} ways were priced. Milliseconds of a step:", ""]
    width = max(len(str(each.way)) for each in choice.table)
    lines.append(f"{'':{width}}  {'step':>9}  " + "  ".join(f"{name:>9}" for name in TERMS))
    for each in choice.table:
        cells = "  ".join(f"{each.terms[name] * 1e3:9.2f}" for name in TERMS)
        lines.append(f"{each.way!s:{width}}  {each.seconds * 1e3:9.2f}  {cells}")
    lines += ["", *(f"{name}: {text}" for name, text in SAID.items()), "", *_coefficients(choice)]
    return "\n".join(lines)


def _coefficients(choice: Choice) -> list[str]:
    facts, model = choice.facts, choice.facts.model
    lines = [
        f"model {model.name}: {model.parameters:,} parameters, {model.bytes / 1e6:.1f} MB of gradients in "
        f"{len(model.span_bytes)} spans, batch {facts.batch}"
    ]
    for each in facts.cluster.hosts:
        host = each.host
        lines.append(
            f"host {host.kind}: {each.count} × {host.cores} cores, {host.memory_bytes / 1e9:.1f} GB"
            + ("" if host.measured else f", never measured: scaled, ±{host.spread:.0%}")
        )
        for split in host.splits:
            if split.error:
                lines.append(f"  {split.processes} × {split.threads}: {split.error}")
                continue
            cpu_s = split.pass_cpu_s.value + split.sample_cpu_s.value * facts.batch
            lines.append(
                f"  {split.processes} × {split.threads}: C = {split.pass_cpu_s.value * 1e3:.3g} + "
                f"{split.sample_cpu_s.value * 1e3:.3g} · b = {cpu_s * 1e3:.4g} CPU ms, κ = "
                f"{split.wall_per_cpu.value:.3g}"
            )
    link = facts.cluster.link
    if link is not None and facts.cluster.size > 1:
        lines.append(
            f"link: α = {link.latency_s.value * 1e6:.3g} µs, β = {link.s_per_byte.value * 1e9:.3g} ns per byte "
            f"({8e-9 / link.s_per_byte.value:.3g} Gbit/s), d = {link.both_ways.value:.2g}, γ = "
            f"{link.cpu_s_per_byte.value * 1e9:.3g} CPU ns per byte"
        )
    return lines


def as_json(choice: Choice, epochs: float) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "best": _plain(choice, choice.best, epochs),
        "table": [_plain(choice, each, epochs) for each in choice.table],
        "ties": [str(each.way) for each in choice.ties],
        "refused": [{"way": str(way), "why": why} for way, why in choice.refused],
        "candidates": choice.candidates,
        "batch": choice.facts.batch,
        "indistinct": choice.facts.indistinct,
        "why": paragraph(choice),
        "notes": list(choice.facts.notes),
    }


def _plain(choice: Choice, each: Prediction, epochs: float) -> dict[str, Any]:
    low, high = each.interval()
    way = each.way
    return {
        "strategy": way.strategy,
        "placement": way.placement,
        "hosts": [
            {"kind": one.kind, "count": one.count, "processes": one.processes, "threads": one.threads}
            for one in way.hosts
        ],
        "workers": way.workers,
        "servers": way.servers,
        "samples_per_second": each.rate,
        "low": low,
        "high": high,
        "step_s": each.seconds,
        "terms_s": each.terms,
        "epochs_s": epoch_s(choice, each, epochs),
        "memory_bytes": each.memory_bytes,
        "trains_as_one_process": way.trains_alike,
        "level": each.level,
    }
