"""Settings that differ between the layers of a model: `features=2-classifier=4`.

A layer is named as PyTorch names it, with all that is in it (`features`, `features.0`, `features.0.bias`); `*` stands
for anything.
"""

from collections.abc import Sequence

from manyhands.errors import UnknownName, UsageError
from manyhands.servers.protocol.service import is_in


def numbers(setting: str, entries: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The layers and their numbers, in the order given."""
    found = []
    for entry in entries:
        layer, _, number = entry.rpartition("=")
        if not layer or not number.isdecimal() or int(number) < 1:
            raise UsageError(
                f"{setting}={entry}: expected a layer and a number of at least 1, as in "
                f"{setting}=features=2-classifier=4"
            )
        found.append((layer, int(number)))
    return tuple(found)


def check(layer: str, parameters: Sequence[str]) -> None:
    """Refuse a layer that a model with these parameters does not have; the message says what is where it was sought."""
    if any(is_in(layer, parameter) for parameter in parameters):
        return
    *parents, _ = layer.split(".")
    while parents and not any(parameter.startswith(".".join([*parents, ""])) for parameter in parameters):
        parents.pop()
    prefix = ".".join([*parents, ""])
    inside = [parameter.removeprefix(prefix) for parameter in parameters if parameter.startswith(prefix)]
    raise UnknownName("layer", layer, {prefix + name.partition(".")[0] for name in inside})
