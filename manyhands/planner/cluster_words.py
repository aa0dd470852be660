"""What a cluster's curves say: where half is wasted, what is cheapest, what failures cost."""

from collections.abc import Iterator, Sequence
from typing import Any

from manyhands.planner.explain import duration
from manyhands.planner.facts import Facts
from manyhands.planner.scaling import Curve, Point, cheapest


def cluster_lines(
    facts: Facts, found: Sequence[Curve], epochs: float, within_s: float | None
) -> Iterator[str]:
    if not found:
        return
    yield ""
    sizes = sorted({point.hosts for curve in found for point in curve.points})
    width = max(len(curve.strategy) for curve in found)
    yield f"{'hosts':{width}}  " + "  ".join(f"{size:>9}" for size in sizes) + "  half is wasted at"
    for curve in found:
        by_size = {point.hosts: point for point in curve.points}
        cells = [
            f"{by_size[size].prediction.rate:>9,.0f}" if size in by_size else f"{'–':>9}" for size in sizes
        ]
        where = curve.half_wasted_at
        yield (
            f"{curve.strategy:{width}}  "
            + "  ".join(cells)
            + f"  {f'{where} hosts' if where else 'none of these'}"
        )
    yield "samples/s; each with its best split and servers for so many hosts, in the order of the file"
    yield from _scaled(facts)
    yield from _failures(found)
    if within_s is not None:
        yield _cheapest(facts, found, epochs, within_s)


def _scaled(facts: Facts) -> Iterator[str]:
    for each in facts.cluster.hosts:
        if not each.host.measured:
            yield (
                f"note: hosts of kind {each.host.kind} were never measured: scaled from this machine by two reference "
                f"kernels, and the interval is ±{each.host.spread:.0%} wider"
            )


def _failures(found: Sequence[Curve]) -> Iterator[str]:
    best: Point = found[0].best
    lost = 1 - best.goodput / best.prediction.rate
    if lost > 0:
        yield f"failures of {best.hosts} hosts cost {lost:.2%}: {best.goodput:,.0f} samples/s count"


def _cheapest(facts: Facts, found: Sequence[Curve], epochs: float, within_s: float) -> str:
    if not any(each.cost_per_hour for each in facts.cluster.hosts):
        return "the cheapest: the file has no cost_per_hour"
    if not facts.model.samples_per_epoch:
        return "the cheapest: how many samples an epoch has is not known of this job"
    least = cheapest(facts, found, epochs, within_s)
    if least is None:
        return f"no number of these hosts makes {epochs:g} epochs within {duration(within_s)}"
    return (
        f"cheapest within {duration(within_s)}: {least.point.prediction.way} makes {epochs:g} epochs in "
        f"{duration(least.seconds)} for {least.cost:,.2f} (at {least.point.cost_per_hour:,.2f} per hour)"
    )


def cluster_json(
    facts: Facts, found: Sequence[Curve], epochs: float, within_s: float | None
) -> dict[str, Any]:
    least = cheapest(facts, found, epochs, within_s) if within_s is not None else None
    return {
        "curves": [
            {
                "strategy": curve.strategy,
                "half_wasted_at": curve.half_wasted_at,
                "points": [_point(curve, point) for point in curve.points],
            }
            for curve in found
        ],
        "cheapest": least
        and {"way": str(least.point.prediction.way), "seconds": least.seconds, "cost": least.cost},
    }


def _point(curve: Curve, point: Point) -> dict[str, Any]:
    low, high = point.prediction.interval()
    return {
        "hosts": point.hosts,
        "way": str(point.prediction.way),
        "samples_per_second": point.prediction.rate,
        "low": low,
        "high": high,
        "efficiency": curve.efficiency(point),
        "goodput": point.goodput,
        "cost_per_hour": point.cost_per_hour,
    }
