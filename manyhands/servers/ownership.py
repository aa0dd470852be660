"""Which server owns which part of the flat vector: a pure function, the same on workers and servers.

Spans that follow each other form a **group**: what one message carries. A group is a few megabytes, so that a
backward pass makes few messages and the first leave early. Each group goes to the server that has the fewest
elements so far, so all servers have work from the beginning of the backward pass to its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.replica.layout import Layout, Span

GROUP_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Group:
    """Consecutive spans with one owner."""

    index: int
    server: int
    spans: tuple[Span, ...]

    @property
    def start(self) -> int:
        return self.spans[0].start

    @property
    def stop(self) -> int:
        return self.spans[-1].stop

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def length(self) -> int:
        return self.stop - self.start


def share_out(
    layout: Layout, servers: int, itemsize: int, group_bytes: int = GROUP_BYTES
) -> tuple[Group, ...]:
    """Cut the spans into groups and give each an owner."""
    most = min(group_bytes // itemsize, -(-layout.length // servers))
    owned = [0] * servers
    groups: list[Group] = []
    for spans in _runs(layout.spans, most):
        server = owned.index(min(owned))
        group = Group(index=len(groups), server=server, spans=tuple(spans))
        owned[server] += group.length
        groups.append(group)
    return tuple(groups)


def _runs(spans: Sequence[Span], most: int) -> list[list[Span]]:
    """Runs of at most so many elements; a longer span makes one of its own."""
    runs: list[list[Span]] = []
    for span in spans:
        if runs and span.stop - runs[-1][0].start <= most:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs
