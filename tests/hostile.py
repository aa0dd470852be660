"""Files as another person might have made them: valid ones that are changed at random, always in the same way."""

import json
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from manyhands.errors import ManyhandsError

TRIES = 250
SECONDS = 0.5
ROOM_BYTES = 1 << 30

ODD: list[Any] = [
    *(None, True, -1, 0, 3, 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 64, 10**30, 0.5, -1e308, float("nan")),
    *("", "x", "../x", "/etc/passwd", "\0", "\ud800", "nan", "9" * 5000),
    *([], [[]], [0, 1 << 40], [[5, -5]], {}, {"x": 1}, {"pairs": 1}, [None]),
]


@contextmanager
def little_memory() -> Iterator[None]:
    """While this process can take no more than a gigabyte; what takes more fails with an error that is not ours."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def mutants(valid: bytes, seed: int = 0) -> Iterator[bytes]:
    """The file with bytes changed, cut off, repeated, left out and put in."""
    draw = random.Random(seed)
    for _ in range(TRIES):
        content = bytearray(valid)
        for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
            place = draw.randrange(len(content) + 1)
            length = draw.choice((1, 1, 2, 4, 8, 64))
            way = draw.randrange(6)
            if way == 0:
                content[place : place + 1] = bytes([draw.randrange(256)])
            elif way == 1:
                content[place : place + length] = draw.choice((b"\0", b"\xff", b"\x7f", b"9")) * length
            elif way == 2:
                del content[place : place + length]
            elif way == 3:
                content[place:place] = draw.choice((b"[", b"{", b'"', b"\n", b"-", b"\x80", b"(")) * length
            elif way == 4:
                content[place:place] = content[place // 2 : place // 2 + length]
            elif draw.random() < 0.3:
                del content[place:]
        yield bytes(content)


def odd_values(value: Any, seed: int = 0) -> Iterator[Any]:
    """A plain value with something odd in one place or two."""
    draw = random.Random(seed)
    for _ in range(TRIES):
        changed = json.loads(json.dumps(value))
        for _ in range(draw.choice((1, 1, 2))):
            place: Any = changed
            while True:
                keys = list(place) if isinstance(place, dict) else list(range(len(place)))
                if not keys:
                    break
                key = draw.choice(keys)
                if isinstance(place[key], (dict, list)) and place[key] and draw.random() < 0.8:
                    place = place[key]
                    continue
                if isinstance(place, dict) and draw.random() < 0.1:
                    del place[key]
                else:
                    place[key] = draw.choice(ODD)
                break
        yield changed


def endure(
    cases: Iterator[Any], put: Callable[[Any], Any], read: Callable[[], Any], *, is_bounded: bool = True
) -> dict[str, int]:
    """Every case loads or is refused with an error of ours; returns how many did which. A session reserves addresses by
    the terabyte, so its memory cannot be bounded like this."""
    counts = {"loaded": 0, "refused": 0}
    end_s = time.monotonic() + SECONDS
    with little_memory() if is_bounded else nullcontext():
        for case in cases:
            put(case)
            try:
                read()
                counts["loaded"] += 1
            except ManyhandsError:
                counts["refused"] += 1
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}, for {repr(case)[:2000]}") from error
            if time.monotonic() > end_s:
                break
    return counts
