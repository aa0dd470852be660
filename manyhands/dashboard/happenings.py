"""What happened in a run, one thing after the other: generations, deaths, joins, checkpoints, evaluations, warnings."""

from typing import Any

from manyhands.telemetry.lines import Record, number

CHANGES = ("death", "leave", "host", "join", "again", "server", "coordinator", "stuck", "mixed", "leaving")
OTHERS = ("checkpoint", "saved", "warning", "end", "dropped")
MOST_OF_A_KIND = 500
LONGEST_TEXT = 400
MOST_LAYERS = 400


class Happenings:
    """Events of a run, the oldest of very many left out; the evaluations; and which members are gone."""

    def __init__(self) -> None:
        self.events: dict[str, list[Record]] = {}
        self.left_out = 0
        self.evaluations: list[Record] = []
        self.classes: Record | None = None
        self.layers: Record | None = None
        self.gone: set[int] = set()
        self.version = 0

    def add(self, record: Record) -> None:
        """Take a record that is no step."""
        kind, rank = record["kind"], record["rank"]
        if kind == "evaluate":
            self._add_evaluation(record)
        elif kind == "classes":
            self.classes, self.version = record, self.version + 1
        elif kind == "layers" and isinstance(record.get("layers"), list):
            layers = [one for one in record["layers"][:MOST_LAYERS] if isinstance(one, dict)]
            self.layers, self.version = {"step": record.get("step"), "layers": layers}, self.version + 1
        elif kind in CHANGES or kind in OTHERS:
            self._change(kind, rank, record.get("ranks"))
            if kind in CHANGES or rank <= 0:  # what all workers say is said once
                self._keep(kind, record)

    def not_a_number(self, record: Record) -> None:
        """A loss that is none: the curve has a gap there."""
        self._keep("not a number", {"t": record["t"], "rank": record["rank"], "step": record.get("step")})

    def listed(self) -> list[Record]:
        """In the order of their times."""
        return sorted(
            (event for events in self.events.values() for event in events), key=lambda event: event["t"]
        )

    def _keep(self, kind: str, record: Record) -> None:
        kept = self.events.setdefault(kind, [])
        plain = {key: _plain(value) for key, value in list(record.items())[:20]}
        kept.append(plain | {"kind": kind, "t": float(record["t"])})
        if len(kept) > MOST_OF_A_KIND:
            del kept[1]  # the first stays
            self.left_out += 1
        self.version += 1

    def _add_evaluation(self, record: Record) -> None:
        if self.evaluations and self.evaluations[-1]["step"] == record.get("step"):
            return  # another worker has said it
        plain = {key: _plain(value) for key, value in list(record.items())[:40]}
        plain.setdefault("step", None)
        self.evaluations.append(plain)
        if len(self.evaluations) > 4 * MOST_OF_A_KIND:
            del self.evaluations[0:MOST_OF_A_KIND:2]
        self.version += 1

    def _change(self, kind: str, rank: int, ranks: Any) -> None:
        """Members that come and go."""
        if kind == "again":
            self.gone.clear()
        elif kind == "join":
            self.gone.discard(rank)
        elif kind in ("death", "leave"):
            self.gone.add(rank)
        elif kind == "host" and isinstance(ranks, list):
            self.gone |= {one for one in ranks if isinstance(one, int)}


def _plain(value: Any) -> Any:
    """A number, a short text, or a short list of them."""
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    if isinstance(value, list):
        return [_plain(one) for one in value[:100] if not isinstance(one, list | dict)]
    return value if isinstance(value, bool) or number(value) is not None else None
