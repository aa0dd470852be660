"""What happens to a run, told to a person in one line and kept as fields."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a person should know of: one line, and the same as fields."""

    kind: str
    text: str
    fields: dict[str, object] = field(default_factory=dict)
