"""Runs with faults. A fault is data, `(who, when, kind)`; the run's supervisor gets it, and says whether it fired.

`who` is a worker's number. `when` is a step, in the middle of whose forward pass the worker does it to itself, or a
number of seconds after the first step, when the supervisor does it. A fault of the kind `update` kills a worker, or a
server by its rank, in the middle of so many calls of its optimizer (`training.Own`). One of the kind `memory` takes a
worker into a control group (setting `memory_group`) and asks for memory until the kernel kills it. `disk` fills the
file system on which the run saves (`saves`), and `room` gives it back.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import placement as placements
from manyhands import strategies
from manyhands.cluster.launcher import cores, supervisor
from manyhands.cluster.launcher.blame import Outcome
from manyhands.cluster.launcher.coordination import Elastic
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.launch_plan import LaunchPlan
from manyhands.cluster.worker.world import World

SCRIPT = Path(__file__).with_name("training.py")
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "segfault": signal.SIGSEGV,
    "leave": signal.SIGUSR1,
}
MORTAL = {"kill", "stop", "segfault", "memory", "update"}  # a worker does not outlive these
CALLED = {"coordinator": "coordinator", "server": "server {}", "starting": "worker {}"}  # as `top` shows them
PATIENCE_S = 90.0
DISK = "disk"  # in a run's folder: the file system that is filled


@dataclass(frozen=True)
class Fault:
    """One worker, one moment, one kind: kill, stop, segfault, memory, leave, update; or server, of which `who` is the
    number; or starting, of a worker that need not have begun its script; or coordinator, disk, room (which have no
    `who`)."""

    who: int
    when: float | int
    kind: str = "kill"


@dataclass
class Logs:
    """What the workers of a run have noted, by number."""

    folder: Path
    logs: dict[int, list[dict[str, Any]]]

    @property
    def ends(self) -> dict[int, dict[str, Any]]:
        """What the workers that finished said last, by number."""
        return {number: log[-1] for number, log in self.logs.items() if log[-1]["kind"] == "end"}

    def parameters(self, number: int) -> Tensor:
        found: Tensor = torch.load(self.folder / f"params-{number}.pt", weights_only=True)
        return found

    def used(self) -> list[list[int]]:
        """The samples of every step, of those workers that are known to have made it."""
        noted: dict[int, dict[int, list[int]]] = {}
        steps: dict[int, list[int]] = {}
        for number, log in sorted(self.logs.items()):
            for row in log:
                if row["kind"] == "step":
                    noted.setdefault(row["step"], {})[number] = row["ids"]
                elif row["kind"] == "made":
                    steps.setdefault(row["step"], []).extend(noted[row["step"]][number])
        return [steps[number] for number in sorted(steps)]

    def committed(self) -> list[list[int]]:
        """The samples of every step that counts, as the workers noted them before each step.

        Workers of one replica may have the same samples. A worker that died in a step may have had a part in it: the
        others know how many samples it had. If several died in it, those had no part whose samples others use later
        in the epoch.
        """
        noted: dict[int, dict[int, list[int]]] = {}
        sure: dict[int, set[int]] = {}
        samples: dict[int, int] = {0: 0}
        epochs: dict[int, int] = {}
        for number, log in self.logs.items():
            for row in log:
                if row["kind"] == "step":
                    noted.setdefault(row["step"], {})[number] = row["ids"]
                elif row["kind"] == "made":
                    sure.setdefault(row["step"], set()).add(number)
                    samples[row["step"]] = row["samples"]
                    epochs[row["step"]] = row["epoch"]
        steps = []
        for step in sorted(sure):
            known = dict.fromkeys(i for number in sorted(sure[step]) for i in noted[step][number])
            doubtful = [ids for number, ids in noted[step].items() if number not in sure[step]]
            wanted = samples[step] - samples[step - 1]
            if len(known) < wanted:
                after = [later for later in sure if later > step and epochs[later] == epochs[step]]
                used = {i for later in after for number in sure[later] for i in noted[later][number]}
                known |= dict.fromkeys(i for ids in doubtful if used.isdisjoint(ids) for i in ids)
            assert len(known) == wanted, f"step {step}: {wanted} samples, of {noted[step]}, sure {sure[step]}"
            steps.append(list(known))
        return steps


@dataclass
class Ran(Logs):
    """How a run with faults went."""

    outcome: Outcome
    events: list[Event]
    fired: list[Fault]

    @property
    def killed(self) -> list[int]:
        """The ids of the workers that the faults have ended."""
        return [self.logs[fault.who][0]["pid"] for fault in self.fired if fault.kind in MORTAL]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def fields_of(self, kind: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.of(kind)]


def run(
    folder: Path,
    faults: Sequence[Fault],
    *,
    workers: int = 3,
    strategy: str = "all-reduce",
    servers: int = 0,
    placement: str = "single",
    replace: int = 0,
    most: int | None = None,
    stall_s: float = 10.0,
    script: Path = SCRIPT,
    **settings: Any,
) -> Ran:
    """Train in real processes, with these faults; `settings` are for the script."""
    pending = list(faults)
    fired: list[Fault] = []
    events: list[Event] = []
    lines: list[str] = []
    began_s = time.monotonic()
    first_step_s = [0.0]

    def on_tick() -> None:
        assert time.monotonic() < began_s + PATIENCE_S, f"the run hangs: {lines[-20:]}"
        if not first_step_s[0]:
            first_step_s[0] = (
                time.monotonic() if any(has_stepped(log) for log in logs_in(folder).values()) else 0
            )
            return
        for fault in [one for one in pending if isinstance(one.when, float)]:
            if time.monotonic() - first_step_s[0] >= fault.when and _do(fault, folder):
                pending.remove(fault)
                fired.append(fault)
        if not any(isinstance(fault.when, float) for fault in pending):
            (folder / "enough").touch()

    mesh, traits = placements.parse(placement).mesh(workers), strategies.parse(strategy).traits
    inside = [[fault.who, fault.when, fault.kind] for fault in faults if isinstance(fault.when, int)]
    outcome = supervisor.run(
        LaunchPlan(
            command=[str(script), str(folder), json.dumps({"faults": inside, **settings})],
            workers=workers,
            layout=cores.layout(workers, 1, servers),
            environ={
                "MANYHANDS_STRATEGY": strategy,
                "MANYHANDS_PLACEMENT": placement,
                "OMP_NUM_THREADS": "1",
            },
            run_dir=None,
            load="manyhands.engine.session",
            servers=servers,
        ),
        on_tick=on_tick,
        on_line=lambda rank, line: lines.append(f"[{rank}] {line}"),
        elastic=Elastic(
            most=most or workers,
            replace=replace,
            stall_s=stall_s,
            group_size=mesh.members,
            replicas_equal=traits.synchronous,
            parts_outlive=mesh.members > 1 and traits.parts_outlive,
        ),
        on_event=events.append,
        steps=lambda: sum(map(_steps, folder.glob("log-*.jsonl"))),
    )
    logs = logs_in(folder)
    fired += [
        fault
        for fault in pending
        if any(
            row == {"kind": "fault", "step": fault.when, "fault": fault.kind}
            for row in logs.get(fault.who, [])
        )
    ]
    assert outcome.ok, (outcome, lines[-30:], [event.text for event in events])
    pids = {log[0]["pid"] for log in logs.values()}
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "a process is left"
    return Ran(outcome=outcome, events=events, fired=fired, folder=folder, logs=logs)


def logs_in(folder: Path) -> dict[int, list[dict[str, Any]]]:
    found = {}
    for path in folder.glob("log-*.jsonl"):
        lines = path.read_text().split("\n")[:-1]  # what follows the last newline was cut off by a death
        if lines:
            found[int(path.stem.partition("-")[2])] = [json.loads(line) for line in lines]
    return found


def _steps(path: Path) -> int:
    return path.read_bytes().count(b'"made"')


def has_stepped(log: list[dict[str, Any]]) -> bool:
    return any(row["kind"] == "made" for row in log)


def _do(fault: Fault, folder: Path) -> bool:
    if fault.kind in ("disk", "room"):
        _fill(folder / DISK / "ballast", is_full=fault.kind == "disk")
        return True
    if fault.kind in CALLED:
        name = CALLED[fault.kind].format(fault.who)
        pids = [pid for pid in _children(os.getpid()) if _name(pid) == name]
    else:
        pids = [log[0]["pid"] for number, log in logs_in(folder).items() if number == fault.who]
    for pid in pids:
        os.kill(pid, SIGNALS.get(fault.kind, signal.SIGKILL))
    return bool(pids)


def _fill(ballast: Path, *, is_full: bool) -> None:
    if not is_full:
        ballast.unlink()
        return
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):  # until there is no room
        while True:
            file.write(bytes(4096))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def alone_and_late(steps: Sequence[Sequence[int]], pauses: Collection[int], *, lr: float) -> Tensor:
    """The same where gradients are applied one step late, and taken where the parameters will be then; nothing stays
    late over a pause, which follows after so many steps."""
    from tests.faults import training

    net = training.net()
    made = training.optimizer("momentum", net, lr)
    data = training.Numbered(training.LENGTH)
    params = list(net.parameters())
    late: list[Tensor] | None = None
    last: list[Tensor] | None = None

    def apply(gradients: Sequence[Tensor] | None) -> None:
        if gradients is not None:
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            made.step()

    for number, ids in enumerate(steps, 1):
        here = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param, now, before in zip(params, here, last or here, strict=True):
                param.add_(now - before)
        gradients = torch.autograd.grad(training.loss(net, data.batch(torch.tensor(ids), 0)), params)
        with torch.no_grad():
            for param, now in zip(params, here, strict=True):
                param.copy_(now)
        apply(late)
        late, last = list(gradients), here
        if number in pauses:
            apply(late)
            late = last = None
    return nn.utils.parameters_to_vector(params).detach()


def alone_under(
    strategy: str, steps: Sequence[Sequence[int]], pauses: Collection[int], *, optimizer: str, lr: float
) -> Tensor:
    """The same in one process of ours under a strategy, with pauses after so many steps."""
    from tests.faults import training
    from tests.sessions import session_of
    from tests.threads import in_threads

    dtype = training.precision(optimizer)
    net = training.net(dtype)
    made, data = training.optimizer(optimizer, net, lr), training.Numbered(training.LENGTH, dtype)

    def work(world: World) -> Tensor:
        session = session_of(net, made, training.loss, world=world, strategy=strategy)
        for number, ids in enumerate(steps, 1):
            session.step(data.batch(torch.tensor(ids), 0))
            if number in pauses:
                session.evaluate(data)
        session.close()
        return nn.utils.parameters_to_vector(net.parameters()).detach()

    return in_threads(1, work)[0]


def alone_and_deferred(
    steps: Sequence[Sequence[int]],
    pauses: Collection[int],
    *,
    optimizer: str,
    lr: float,
    layer: str,
    every: int,
) -> Tensor:
    """The same where of one layer the mean of so many gradients is applied at once; at a pause, of those there are."""
    from tests.faults import training

    dtype = training.precision(optimizer)
    net = training.net(dtype)
    made = training.optimizer(optimizer, net, lr)
    data = training.Numbered(training.LENGTH, dtype)
    params = list(net.parameters())
    late = [name.startswith(f"{layer}.") for name, _ in net.named_parameters()]
    kept: list[tuple[Tensor, ...]] = []

    def apply(gradients: Sequence[Tensor] | None, held: Sequence[Sequence[Tensor]]) -> None:
        means = [torch.stack(some).mean(0) for some in zip(*held, strict=True)]
        for index, param in enumerate(params):
            param.grad = means[index] if late[index] and means else None
            if not late[index] and gradients:
                param.grad = gradients[index]
        made.step()

    for number, ids in enumerate(steps, 1):
        gradients = torch.autograd.grad(training.loss(net, data.batch(torch.tensor(ids), 0)), params)
        kept.append(gradients)
        apply(gradients, kept if len(kept) == every else [])
        kept = kept if len(kept) < every else []
        if number in pauses and kept:
            apply(None, kept)
            kept = []
    return nn.utils.parameters_to_vector(params).detach()


def alone(
    steps: Sequence[Sequence[int]],
    *,
    optimizer: str,
    lr: float,
    clip_norm: float | None = None,
    norms: bool = False,
) -> Tensor:
    """The parameters, and running statistics, after the same sequence of batches in one process, by plain PyTorch."""
    from tests.faults import training

    dtype = training.precision(optimizer)
    net = training.net_with_norms(dtype) if norms else training.net_of(optimizer)
    made = training.optimizer(optimizer, net, lr)
    data = training.Numbered(training.LENGTH, dtype)
    for ids in steps:
        made.zero_grad()
        training.loss(net, data.batch(torch.tensor(ids), 0)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        made.step()
    return training.values(net)
