"""The grammar of names with settings: `all-reduce:topology=ring`, `mlp:hidden=512`, `synthetic:3x32x32:10`.

One small language for everything a person picks from a table. What follows the name is split at `,` into
`key=value` settings; pieces without `=` are split at `:` and stay positional, so that paths and shapes read naturally.
A frozen dataclass is at once the configuration, this grammar and the record in reports.
"""

import dataclasses
import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from manyhands.errors import UnknownName, UsageError

T = TypeVar("T")


def split(text: str) -> tuple[str, list[str], dict[str, str]]:
    """`name:a:b,key=value` → the name, the positional pieces and the settings.

    >>> split("synthetic:3x32x32:10")
    ('synthetic', ['3x32x32', '10'], {})
    >>> split("all-reduce:topology=ring")
    ('all-reduce', [], {'topology': 'ring'})
    >>> split("parameter-server:stale:bound=4")
    ('parameter-server', ['stale'], {'bound': '4'})
    """
    name, _, rest = text.partition(":")
    positional: list[str] = []
    settings: dict[str, str] = {}
    for piece in rest.split(",") if rest else []:
        key, equals, value = piece.partition("=")
        if equals:
            *before, key = key.split(":")
            positional.extend(before)
            settings[key.strip().replace("-", "_")] = value.strip()
        else:
            positional.extend(piece.split(":"))
    return name.strip(), positional, settings


def convert(value: str, hint: Any, where: str) -> Any:
    """Text from the command line as the type that the settings class declares."""
    if get_origin(hint) in (Union, types.UnionType):
        if value.lower() == "none":
            return None
        hint = next(choice for choice in get_args(hint) if choice is not type(None))
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return tuple(convert(piece, inner, where) for piece in value.split("-"))
    if hint is bool:
        known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if value.lower() not in known:
            raise UsageError(f"{where}={value}: expected true or false")
        return known[value.lower()]
    if hint in (int, float):
        try:
            return hint(value)
        except ValueError:
            raise UsageError(
                f"{where}={value}: expected {'a whole' if hint is int else 'a'} number"
            ) from None
    return value


def settings_of(
    factory: Callable[..., Any], settings: Mapping[str, str], kind: str, name: str
) -> dict[str, Any]:
    """Check and convert the settings for a dataclass or function; unknown ones list the known ones."""
    hints = {key: hint for key, hint in get_type_hints(factory).items() if key != "return"}
    if dataclasses.is_dataclass(factory):
        hints = {field.name: hints[field.name] for field in dataclasses.fields(factory)}
    for key in settings:
        if key not in hints:
            raise UnknownName(f"setting of {kind} {name}", key, hints or ["none at all"])
    return {key: convert(value, hints[key], f"{name}:{key}") for key, value in settings.items()}


def parse(
    text: str,
    table: Mapping[str, Callable[..., T]],
    kind: str,
    elsewhere: Mapping[str, str] | None = None,
) -> T:
    """Build the named entry of a table with its settings: the inverse of `describe`. `elsewhere` are names of other
    systems, and what they are called here."""
    name, positional, settings = split(text)
    if name not in table:
        raise UnknownName(kind, name, table, elsewhere)
    first = getattr(table[name], "POSITIONAL", None)  # the setting that needs no key
    if positional and first and first not in settings:
        settings[first] = positional.pop(0)
    if positional:
        raise UsageError(f"{kind} {text!r}: write settings as key=value, not {positional[0]!r}")
    return table[name](**settings_of(table[name], settings, kind, name))


def describe(value: Any, name: str) -> str:
    """The shortest text that `parse` turns back into this value."""
    changed = [
        f"{field.name}={text(getattr(value, field.name))}"
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"{name}:{','.join(changed)}" if changed else name


def text(setting: Any) -> str:
    """A setting as a person writes it: lists with dashes."""
    return "-".join(map(str, setting)) if isinstance(setting, (list, tuple)) else str(setting)


def imported(path: str, kind: str) -> Any:
    """What `package.module:name` points at."""
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise UsageError(f"{kind} {path!r}: cannot import {module_name!r} ({error})") from error
    except AttributeError:
        raise UsageError(f"{kind} {path!r}: module {module_name!r} has no {attribute!r}") from None
