"""Several workers of a host count on the memory ordering of its processor."""

import os
import platform
import sys
from pathlib import Path

import pytest

from manyhands import cli
from manyhands.cli import doctor
from manyhands.comm.transports.host import Host
from manyhands.errors import UsageError

REFUSED = "2 workers on one host rely on the memory ordering of x86-64, and this is aarch64; use 1 worker"


@pytest.fixture
def other_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")


@pytest.mark.usefixtures("other_processor")
def test_one_worker_runs_on_every_processor_and_two_are_refused() -> None:
    Host(os.memfd_create("test"), [0], 0).close()  # and the file with it
    with pytest.raises(UsageError, match=REFUSED):
        Host(-1, [0, 1], 0)


@pytest.mark.usefixtures("other_processor")
@pytest.mark.parametrize("workers", ["2", "1:2"])
def test_the_launcher_refuses_before_it_starts_a_worker(
    workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)  # which a command that failed leaves behind
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    out = str(tmp_path / "run")
    assert cli.main(["launch", "--workers", workers, "--out", out, str(script)]) == 2
    assert REFUSED in capsys.readouterr().err
    assert not (tmp_path / "started").exists()


@pytest.mark.usefixtures("other_processor")
def test_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBES", {})
    level, details = next((level, text) for level, what, text in doctor.findings() if what == "processor")
    assert level == "note"
    assert REFUSED in details


@pytest.mark.processes
def test_doctor_has_nothing_to_say_against_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBES", {})
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert ("ok", "processor") in [(level, what) for level, what, _ in doctor.findings()]
