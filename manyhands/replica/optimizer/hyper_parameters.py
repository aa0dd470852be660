"""The numbers among an optimizer's settings: read, and written from another process's."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

NamedNumbers = list[dict[str, list[float]]]  # of an optimizer, by parameter group and name


def hyper_parameters(optimizer: Optimizer) -> list[float]:
    """All numbers and switches that a script could have changed, in a fixed order."""
    return [number for group in named_numbers(optimizer) for values in group.values() for number in values]


def set_hyper_parameters(optimizer: Optimizer, values: Sequence[float]) -> None:
    """The inverse of `hyper_parameters`: a worker without data follows those that have some."""
    rest = iter(values)
    for group in optimizer.param_groups:
        for key in [key for key in group if key != "params"]:
            group[key] = _with_numbers(group[key], rest)


def named_numbers(optimizer: Optimizer) -> NamedNumbers:
    """The same numbers by group and name."""
    found: NamedNumbers = []
    for group in optimizer.param_groups:
        found.append({})
        for key, value in group.items():
            if key != "params" and (numbers := list(_numbers_in(value))):
                found[-1][key] = numbers
    return found


def set_named_numbers(optimizer: Optimizer, groups: Sequence[Mapping[str, Sequence[float]]]) -> None:
    """Take over the numbers of another process's optimizer; what only that one has (a scheduler's notes) is not."""
    known = named_numbers(optimizer)
    for group, mine, theirs in zip(optimizer.param_groups, known, groups, strict=False):
        for key in mine.keys() & theirs.keys():
            if len(mine[key]) == len(theirs[key]):
                group[key] = _with_numbers(group[key], iter(theirs[key]))


def _numbers_in(setting: Any) -> Iterator[float]:
    if isinstance(setting, (tuple, list)):
        for item in setting:
            yield from _numbers_in(item)
    elif isinstance(setting, (int, float)) or (isinstance(setting, Tensor) and setting.numel() == 1):
        yield float(setting)


def _with_numbers(setting: Any, numbers: Iterator[float]) -> Any:
    """The setting with other numbers in it, in the order in which `_numbers_in` finds them."""
    if isinstance(setting, (tuple, list)):
        return type(setting)(_with_numbers(item, numbers) for item in setting)
    if isinstance(setting, bool):
        return bool(next(numbers))
    if isinstance(setting, (int, float)):
        new = next(numbers)
        # Who has written `lr=1` or left `weight_decay=0` may write a fraction there later.
        return int(new) if isinstance(setting, int) and new.is_integer() else new
    if isinstance(setting, Tensor) and setting.numel() == 1 and (new := next(numbers)) != float(setting):
        setting.fill_(new)
    return setting
