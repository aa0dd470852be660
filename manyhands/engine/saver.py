"""Saving without stopping: the step waits for a copy of the state into memory, and a process writes that copy.

All workers of the first host write what they have to give into shared scratch memory, each at its place in the file to
come; workers of other hosts send theirs. Then training goes on. Only worker 0 knows the process that writes: it hears
of its end at one of the next steps, or waits for it before the next save and at the end. Worker 0 may have another rank
by then; if it has died, the process has ended with it.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from manyhands import telemetry
from manyhands.checkpoint import index, record_file, tensor_file
from manyhands.checkpoint.background_write import Writing, wait_for
from manyhands.checkpoint.disk import REAL_DISK, ensure_directory, partial_of, reason
from manyhands.checkpoint.publish import RECORD, TENSORS, check_numbers, failure
from manyhands.checkpoint.tensor_file import FileLayout, Form
from manyhands.checkpoint.writer import Job
from manyhands.cluster.worker.world import World
from manyhands.comm.transports.arena import PAGE, available_bytes, give_back
from manyhands.errors import CheckpointError

_PLACE = 1 << 62  # in the host's memory, far above what all generations allocate
_PLACE_BYTES = 1 << 50  # for one copy: several sessions of a process may be saving at once

_taken: set[int] = set()  # places whose copies are being made or written, by number


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Where the copy is made: `fd` from `start` on. Worker 0 gives it back when it is written, others when copied."""

    fd: int
    start: int
    give_back: Callable[[], None]


class Saver:
    """The saves of one session, one at a time."""

    def __init__(self, world: World, warn: Callable[[str], None]) -> None:
        self.world = world
        self._warn = warn
        self.writing: tuple[Writing, Scratch] | None = None  # on the worker that has it written
        self._is_begun = False
        self._knows = False  # whether this worker hears what becomes of the last save
        self._failure = ""  # and why it is not on the disk

    def save(
        self,
        directory: Path,
        *,
        step: int,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any] | None,
        keep: int,
    ) -> None:
        """Copy what each worker gives, and worker 0's record; returns when training may go on."""
        check_numbers(step, keep)
        self.wait_alone()
        if self.world.rank == 0:
            wait_for(directory)  # another session may be saving there
        self._is_begun, self._knows, self._failure = True, False, ""
        text, forms, text_bytes = self._describe(directory, step, tensors, record)
        layout = tensor_file.lay_out({name: form for each in forms for name, form in each.items()})
        scratch = self._claim(layout.size_bytes + text_bytes, directory, step)
        is_copied = False
        try:
            problem = self._copy(scratch, layout, tensors, text, forms)
            self._all_well(directory, step, problem)
            is_copied = True
        finally:
            if scratch and not (is_copied and self.world.rank == 0):
                scratch.give_back()
        if scratch and self.world.rank == 0:
            sizes = {TENSORS: layout.size_bytes, RECORD: text_bytes}
            pid = os.getpid()
            job = Job(fd=scratch.fd, start=scratch.start, sizes=sizes, step=step, keep=keep, parent=pid)
            self._start(job, directory, scratch)

    def look(self) -> None:
        """Between steps: note the end of the save that is under way, if it has ended."""
        if self.writing and self.writing[0].is_over():
            self.wait_alone()

    def outcome(self) -> str | None:
        """All workers together, when the last save is over: why it is not on the disk, or nothing.

        None if no worker knows: the worker that had it written is gone, and so is what it had written.
        """
        self.wait_alone()
        said = self.world.gather(json.dumps([self._is_begun, self._knows, self._failure]).encode())
        rows = [json.loads(row) for row in said]
        known = [failure for _, knows, failure in rows if knows]
        if known:
            return str(known[0])
        return None if any(is_begun for is_begun, _, _ in rows) else ""

    def wait_alone(self) -> None:
        """Until nothing that this worker looks after is under way; what failed is a warning."""
        if not self.writing:
            return
        (writing, scratch), self.writing = self.writing, None
        result = writing.wait()
        scratch.give_back()
        if result.error:
            self._fail(result.error)
        else:
            telemetry.event("saved", step=writing.step, seconds=writing.took_s)
        for text in result.warnings:
            self._warn(text)

    # The copy

    def _describe(
        self, directory: Path, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any] | None
    ) -> tuple[bytes, list[dict[str, Form]], int]:
        """The record as text, which worker 0 has; by rank what each worker gives; and the size of that text."""
        forms: dict[str, Form] = {}
        text, problem = b"", ""
        try:
            forms = {name: tensor_file.form(name, tensor) for name, tensor in tensors.items()}
            if record is not None:
                text = record_file.encode(record)
                ensure_directory(REAL_DISK, directory)
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = str(failure(directory, step, error))
        said = self.world.gather(json.dumps([problem, forms, len(text)]).encode())
        rows = [json.loads(row) for row in said]
        for problem, _, _ in rows:
            if problem:
                raise CheckpointError(problem)
        return text, [given for _, given, _ in rows], rows[0][2]

    def _claim(self, size_bytes: int, directory: Path, step: int) -> Scratch | None:
        """Memory for the copy, or a file where there is not enough; None for workers of other hosts."""
        world, free = self.world, available_bytes()
        number = next(number for number in itertools.count() if number not in _taken)
        fits, number = map(int, world.exchange([float(size_bytes <= free), float(number)])[0])
        if not fits:
            if world.rank == 0:
                self._warn(
                    f"saving needs {size_bytes / 1e9:.2f} GB for a copy of the state and {free / 1e9:.2f} GB are free: "
                    f"the copy is made in a file in {directory}, and training waits for that"
                )
            return self._claim_file(directory, step)
        if world.rank not in world.hosts[0]:
            return None
        fd = os.dup(world.host.arena.fd)  # generations come and go meanwhile
        start = _PLACE + number * _PLACE_BYTES
        if world.rank == 0:
            _taken.add(number)

        def leave() -> None:
            if world.rank == 0:
                give_back(fd, start, start + -(-size_bytes // PAGE) * PAGE)
                _taken.discard(number)
            os.close(fd)

        return Scratch(fd=fd, start=start, give_back=leave)

    def _claim_file(self, directory: Path, step: int) -> Scratch | None:
        """A file without a name, which all workers of the first host have open."""
        world = self.world
        path, fd, problem = partial_of(directory / index.COPY), -1, ""
        if world.rank == 0:
            fd, problem = _opened(path, os.O_CREAT | os.O_TRUNC)
        problem, name = json.loads(world.gather(json.dumps([problem, str(path.resolve())]).encode())[0])
        if not problem and world.rank in world.hosts[0][1:]:
            fd, problem = _opened(Path(name), 0)
        try:
            self._all_well(directory, step, problem)
        except CheckpointError:
            if fd >= 0:
                os.close(fd)
            raise
        finally:
            if world.rank == 0:
                path.unlink(missing_ok=True)
        return Scratch(fd=fd, start=0, give_back=lambda: os.close(fd)) if fd >= 0 else None

    def _copy(
        self,
        scratch: Scratch | None,
        layout: FileLayout,
        tensors: Mapping[str, Tensor],
        text: bytes,
        forms: list[dict[str, Form]],
    ) -> str:
        """Write everything to its place; returns what went wrong on this worker, after all have given theirs."""
        world = self.world
        problem = _write(scratch, _contents(layout, tensors)) if scratch else ""
        if scratch and world.rank == 0:
            problem = problem or _write(scratch, [(0, layout.head), (layout.size_bytes, text)])
        for rank, given in enumerate(forms):
            if not given or rank in world.hosts[0]:
                continue
            own = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            blob = world.gather(tensors_to_bytes(own) if world.rank == rank else b"")[rank]
            if scratch and world.rank == 0:
                problem = problem or _write(scratch, _contents(layout, tensors_from_bytes(blob)))
        return problem

    def _all_well(self, directory: Path, step: int, problem: str) -> None:
        """All workers raise the first problem that one of them has."""
        for said in self.world.gather(problem.encode()):
            if said:
                raise failure(directory, step, said.decode())

    # The process that writes it

    def _start(self, job: Job, directory: Path, scratch: Scratch) -> None:
        self._knows = True
        try:
            self.writing = Writing(job, directory), scratch
        except OSError as error:
            scratch.give_back()
            self._fail(str(failure(directory, job.step, error)))

    def _fail(self, why: str) -> None:
        self._failure = why
        self._warn(why)


def _opened(path: Path, flags: int) -> tuple[int, str]:
    """A descriptor, or -1 and the reason."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600), ""
    except OSError as error:
        return -1, reason(error)


def _contents(layout: FileLayout, tensors: Mapping[str, Tensor]) -> Iterable[tuple[int, memoryview]]:
    return ((layout.places[name], tensor_file.octets(tensor)) for name, tensor in tensors.items())


def _write(scratch: Scratch, contents: Iterable[tuple[int, bytes | memoryview]]) -> str:
    """Bytes at their places; returns why that failed, if it did.

    Into fresh memory, writing through the descriptor takes half the time of a copy through a mapping.
    """
    try:
        for place, content in contents:
            rest, at = memoryview(content), scratch.start + place
            while len(rest):
                done = os.pwrite(scratch.fd, rest, at)
                rest, at = rest[done:], at + done
    except OSError as error:
        return reason(error)
    return ""
