"""What a test must not leave behind, how the checker sees it, and what may stay and why.

`look()` takes a picture of this process; `leftovers(before)` says what is there now and was not there
then. Only what is *new* counts: what a test closes that was open before is no leak.
"""

import gc
import os
import re
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

OWN_PATIENCE_S = 10.0  # threads and connections that have been told to end need a moment for it
SHARED_PATIENCE_S = 60.0  # /dev/shm belongs to the machine: tests beside this one may use it for a while


@dataclass(frozen=True)
class Allowed:
    """Something that a library opens once, at its first use, and keeps until the process ends."""

    kind: str
    pattern: str
    reason: str


ALLOWED = (
    Allowed("variable", "PYTEST_CURRENT_TEST", "pytest sets it for every phase of a test"),
    Allowed("variable", "TORCHINDUCTOR_CACHE_DIR", "torch sets it when its compiler is first imported"),
    Allowed(
        "descriptor", r"/memfd:manyhands \(deleted\)", "the world of the tests' own process, left at its exit"
    ),
    Allowed("variable", "MANYHANDS_WORKER", "a worker says in it which process it is, for what it starts"),
    Allowed("process", ".*resource_tracker.*", "multiprocessing's helper lives as long as its process"),
)


@dataclass(frozen=True)
class Machine:
    """What a test can leave behind, by kind; each thing is named so that two pictures can be compared."""

    own: Mapping[str, Counter[str]]  # things of this process
    segments: frozenset[str]  # things of the machine
    environment: Mapping[str, str]


def open_what_stays() -> None:
    """What a library opens once and a picture cannot tell from a leak is opened before the first test.

    pyzmq's first message without a copy starts a thread, with a context of its own, that frees such messages. The first
    event loop of libuv, which torch's store runs, opens a pipe for signals. The first update imports torch's compiler,
    whose modules are most of what a collection of garbage would look at.
    """
    if "torch" in sys.modules:
        import torch

        torch.optim.Adam([torch.zeros(1, requires_grad=True)]).step()
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if "zmq" in sys.modules:
        import zmq

        with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
            one.bind("inproc://first")
            other.connect("inproc://first")
            one.send(bytes(zmq.COPY_THRESHOLD + 1), copy=False)
            other.recv()


_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_started: list[str] = []  # commands, as Python announced them
_temporary: list[str] = []  # what `tempfile` made in the machine's folder, not in one that a test owns


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS:
        _started.append(f"{event}{arguments[:2]}"[:300])
    elif event in ("tempfile.mkstemp", "tempfile.mkdtemp"):
        path = os.path.abspath(str(arguments[0]))
        if os.path.dirname(path) == tempfile.gettempdir():
            _temporary.append(path)


sys.addaudithook(_hear)


def look() -> Machine:
    return Machine(
        own={
            "process": Counter(_children()),
            "thread": Counter(os.listdir("/proc/self/task")),
            "descriptor": Counter(_descriptors()),
            "temporary file": Counter(filter(os.path.exists, _temporary)),
        },
        segments=frozenset(os.listdir("/dev/shm")),
        environment=dict(os.environ),
    )


def leftovers(
    before: Machine, own_patience_s: float = OWN_PATIENCE_S, shared_patience_s: float = SHARED_PATIENCE_S
) -> list[str]:
    """Sentences about what is new since `before` and does not go away, garbage collection included."""
    start = time.monotonic()
    pause_s = 0.0005
    now = look()
    own, segments = _new(before, now), now.segments - before.segments
    while own or segments:
        if own:  # an object in a cycle may hold it; only on suspicion, since a collection takes a while
            gc.collect()
        now = look()
        own = _new(before, now)
        segments &= now.segments  # those that came later are not this test's
        if time.monotonic() - start > (own_patience_s if own else shared_patience_s):
            break
        if own or segments:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
    return own + [f"segment /dev/shm/{name}" for name in sorted(segments)] + _changed(before, now)


def _new(before: Machine, now: Machine) -> list[str]:
    """What is new of this process."""
    return [
        sentence
        for kind, things in now.own.items()
        for thing in (things - before.own[kind]).elements()
        if (sentence := _describe(kind, thing))
    ]


def _changed(before: Machine, now: Machine) -> list[str]:
    """Names only: values may be secrets, and reports are kept."""
    names = before.environment.keys() | now.environment.keys()
    changed = sorted(name for name in names if before.environment.get(name) != now.environment.get(name))
    return [f"environment variable {name}" for name in changed if not _is_allowed("variable", name)]


def _is_allowed(kind: str, name: str) -> bool:
    return any(one.kind == kind and re.fullmatch(one.pattern, name) for one in ALLOWED)


def _describe(kind: str, thing: str) -> str | None:
    """What a person needs to find it; None if it may stay or is gone by now."""
    if kind == "process":
        command = _read(f"/proc/{thing}/cmdline").replace("\0", " ").strip()
        return None if _is_allowed(kind, command) else f"process {thing}: {command or 'a zombie'}"
    if kind == "thread":
        native = _read(f"/proc/self/task/{thing}/comm").strip()
        if not native or _is_allowed(kind, native):
            return None
        python = next(
            (one.name for one in threading.enumerate() if str(one.native_id) == thing), "not Python's"
        )
        return f"thread {thing}: {native} ({python})"
    if match := re.fullmatch(r"socket:\[(\d+)\]", thing):
        return f"socket {_address(match[1])}"
    return None if _is_allowed(kind, thing) else f"{kind} {thing}"


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def _children() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        yield from _read(f"/proc/self/task/{task}/children").split()


def _descriptors() -> Iterator[str]:
    """What each descriptor leads to: a number alone may lead elsewhere by now."""
    tracker = str(getattr(resource_tracker._resource_tracker, "_fd", None))  # lives as long as the tracker
    for number in os.listdir("/proc/self/fd"):
        if number == tracker:
            continue
        with suppress(OSError):  # that of this very listing is closed by now
            yield os.readlink(f"/proc/self/fd/{number}")


LISTENING = "0A"  # of the states in /proc/net/tcp


def _address(inode: str) -> str:
    """Where a socket is bound, and whether it listens."""
    for family in ("tcp", "tcp6"):
        for line in _read(f"/proc/self/net/{family}").splitlines()[1:]:
            words = line.split()
            if words[9] == inode:
                port = int(words[1].rpartition(":")[2], 16)
                return f"of {family}, port {port}" + (", listening" if words[3] == LISTENING else "")
    for line in _read("/proc/self/net/unix").splitlines()[1:]:
        words = line.split()
        if words[6] == inode:
            return f"of the host, {' '.join(words[7:]) or 'without a name'}"
    return f"without an address (inode {inode})"


# Tests that start no process: `make test-fast` runs only those.


@dataclass(frozen=True)
class Processes:
    """How many processes this one has started so far."""

    heard: int
    living: Counter[str]
    faults: int  # page faults of children that have ended: each has some, also one started by a library in C

    @classmethod
    def so_far(cls) -> "Processes":
        children = Counter(child for child in _children() if _describe("process", child))
        return cls(len(_started), children, resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt)


def started_since(before: Processes) -> list[str]:
    """The commands of processes started since then, as far as they are known."""
    now = Processes.so_far()
    if now.heard > before.heard:
        return _started[before.heard :]
    if now.living - before.living or now.faults > before.faults:
        return ["a command that Python did not announce"]
    return []
