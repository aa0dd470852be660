"""Which server owns which part of the flat vector: a pure function, the same on workers and servers.

Spans that follow each other form a **group**: what one message carries. A group is a few megabytes, so that a
backward pass makes few messages and the first leave early. Each group goes to the server that has the fewest
elements so far, so all servers have work from the beginning of the backward pass to its end.
"""

from dataclasses import dataclass
from math import prod

from manyhands.replica.layout import Layout, Span

GROUP_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Group:
    """Consecutive spans with one owner."""

    index: int
    server: int
    spans: tuple[Span, ...]
    table: tuple[int, int] | None = None
    """Rows and columns of a parameter that gets gradients for some rows only: then only those travel."""
    every: int = 1
    """Steps from one push to the next."""

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
    for spans in _runs(layout, most):
        server = owned.index(min(owned))
        group = Group(
            index=len(groups),
            server=server,
            spans=tuple(spans),
            table=_table(layout, spans[0]),
            every=_every(layout, spans[0]),
        )
        owned[server] += group.length
        groups.append(group)
    return tuple(groups)


def _table(layout: Layout, span: Span) -> tuple[int, int] | None:
    place = layout.places[span.places[0]]
    return (place.shape[0], prod(place.shape[1:])) if place.rows else None


def _every(layout: Layout, span: Span) -> int:
    return layout.places[span.places[0]].every


def _runs(layout: Layout, most: int) -> list[list[Span]]:
    """Runs of at most so many elements; a longer span makes one of its own, and so does a table."""
    runs: list[list[Span]] = []
    for span in layout.spans:
        before = runs[-1][0] if runs else span
        apart = (
            _table(layout, span) or _table(layout, before) or _every(layout, span) != _every(layout, before)
        )
        if runs and not apart and span.stop - runs[-1][0].start <= most:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs
