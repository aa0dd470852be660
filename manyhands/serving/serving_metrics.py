"""Counts what the server does, as Prometheus reads it."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Latencies:
    """How many answers took how long."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, took_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.sum_s += took_s

    def quantile_s(self, share: float) -> float | None:
        """At most this, for so large a share of the answers; None if there were none, or it is above all bounds."""
        wanted, seen = share * sum(self.counts), 0
        for bound, count in zip(BOUNDS_S, self.counts, strict=False):
            seen += count
            if seen and seen >= wanted:
                return bound
        return None


class ServingMetrics:
    """Of one server, since it began."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int, str]] = Counter()  # by model, version and how they ended
        self.samples: Counter[tuple[str, int]] = Counter()
        self.latencies: dict[tuple[str, int], Latencies] = {}
        self.loads: Counter[tuple[str, str]] = Counter()  # by model and how they ended
        self.responses: Counter[int] = Counter()  # by HTTP status

    def answered(self, model: str, version: int, rows: int, took_s: float, outcome: str) -> None:
        self.requests[model, version, outcome] += 1
        if outcome == "ok":
            self.samples[model, version] += rows
            self.latencies.setdefault((model, version), Latencies()).add(took_s)

    def forget(self, model: str, version: int) -> None:
        """A version that is not served any more has no latencies; its requests stay counted."""
        self.latencies.pop((model, version), None)

    def text(self, gauges: Mapping[str, Mapping[str, float]]) -> str:
        """All of it, with what holds at the moment (`gauges`, by name and then by labels)."""
        return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        yield "# TYPE manyhands_requests_total counter"
        for (model, version, outcome), count in sorted(self.requests.items()):
            labels = f'model="{model}",version="{version}",outcome="{outcome}"'
            yield f"manyhands_requests_total{{{labels}}} {count}"
        yield "# TYPE manyhands_samples_total counter"
        for (model, version), count in sorted(self.samples.items()):
            yield f'manyhands_samples_total{{model="{model}",version="{version}"}} {count}'
        yield "# TYPE manyhands_loads_total counter"
        for (model, outcome), count in sorted(self.loads.items()):
            yield f'manyhands_loads_total{{model="{model}",outcome="{outcome}"}} {count}'
        yield "# TYPE manyhands_http_responses_total counter"
        for status, count in sorted(self.responses.items()):
            yield f'manyhands_http_responses_total{{status="{status}"}} {count}'
        yield "# TYPE manyhands_request_seconds histogram"
        for (model, version), histogram in sorted(self.latencies.items()):
            yield from _histogram_lines(f'model="{model}",version="{version}"', histogram)
        for name, values in gauges.items():
            yield f"# TYPE manyhands_{name} gauge"
            for labels, value in values.items():
                yield f"manyhands_{name}{{{labels}}} {value:g}" if labels else f"manyhands_{name} {value:g}"


def _histogram_lines(labels: str, histogram: Latencies) -> Iterator[str]:
    seen = 0
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), histogram.counts, strict=True):
        seen += count
        yield f'manyhands_request_seconds_bucket{{{labels},le="{bound}"}} {seen}'
    yield f"manyhands_request_seconds_sum{{{labels}}} {histogram.sum_s:.6f}"
    yield f"manyhands_request_seconds_count{{{labels}}} {seen}"
