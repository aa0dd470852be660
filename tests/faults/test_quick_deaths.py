"""Deaths in quick succession, also of replacements that are starting: the run ends only when nothing is left of it."""

import json
import re
import signal
from pathlib import Path

import pytest

from manyhands import strategies
from manyhands.checkpoint.index import latest
from tests.end_to_end.commands import last_error, manyhands
from tests.faults import checks, harness, registered
from tests.faults.harness import Fault

WORKERS = 4
REPLACE = 2
SURVIVOR = 1


def kinds() -> list[str]:
    """One of the registered strategies for each way in which workers keep parameters and make steps."""
    found: dict[object, str] = {}
    for text in registered.every_strategy():
        traits = strategies.parse(text).traits
        if registered.workers(text, replicas=WORKERS) == WORKERS:
            found.setdefault((traits.replica, traits.servers is not None, traits.steps), text)
    return [*found.values()]


@pytest.mark.parametrize("strategy", kinds())
def test_one_worker_that_is_left_goes_on_while_all_others_die(strategy: str, tmp_path: Path) -> None:
    """More than the launcher replaces, and a replacement that has not joined; then a server, if there is one."""
    servers = registered.servers(strategy)
    faults = [Fault(who, step) for who, step in ((0, 3), (2, 4), (3, 5))]
    faults.append(Fault(WORKERS + servers, 0.0, "starting"))
    faults += [Fault(servers - 1, 0.5, "server")] if servers else []
    optimizer, lr = registered.optimizer(strategy), registered.rate(strategy)
    ran = harness.run(
        tmp_path,
        faults,
        workers=WORKERS,
        strategy=strategy,
        servers=servers,
        replace=REPLACE,
        optimizer=optimizer,
        lr=lr,
        pause_s=0.02,
    )
    assert SURVIVOR in ran.ends
    checks.nothing_lost(ran, ran.fired, faults)
    checks.learned(strategy, ran, optimizer, lr=lr)
    assert {0, 2, 3, WORKERS + servers} <= {fields["rank"] for fields in ran.fields_of("death")}
    assert len(ran.of("server")) == (1 if servers else 0)


def test_a_server_is_replaced_as_often_as_steps_are_made_in_between(tmp_path: Path) -> None:
    faults = [Fault(0, 0.0, "server"), Fault(0, 3.5, "server")]
    settings = {"strategy": "parameter-server:sync", "servers": 1, "workers": 2, "replace": 1}
    ran = harness.run(tmp_path, faults, pause_s=0.1, **settings)
    checks.nothing_lost(ran, ran.fired, faults)
    checks.one_history(ran, "momentum")
    assert len(ran.of("server")) == 2


def test_when_no_worker_is_left_the_run_says_who_died_and_what_goes_on(tmp_path: Path) -> None:
    """Replacements are on their way, and have nothing to copy from."""
    saves = tmp_path / "run" / "checkpoints"
    settings = {"saves": str(saves), "save_every": "4 steps", "pause_s": 0.15}
    faults = [[who, 9, "kill"] for who in range(3)]
    script = [str(harness.SCRIPT), str(tmp_path), json.dumps({"faults": faults, **settings})]
    done = manyhands("launch", "--workers", "3", "--out", "run", *script, cwd=tmp_path)
    for who, step, kind in faults:
        assert {"kind": "fault", "step": step, "fault": kind} in harness.logs_in(tmp_path)[who], "it fired"
    assert done.code == 128 + signal.SIGKILL
    assert "Traceback" not in done.err
    saved = latest(saves)
    assert saved
    assert re.fullmatch(
        r"error: worker \d of 3 died: killed by SIGKILL; (workers?( \d,?){1,2} had died before it, and )?no worker is "
        rf"left that has the parameters; the newest checkpoint is {saved.name}, start the same command again: "
        r'session\.resume\("run/checkpoints"\) in the script goes on',
        last_error(done.err),
    )
