"""What `doctor` warns of, on machines that are made up of files."""

from pathlib import Path

import pytest

from manyhands.cli import machine_checks
from manyhands.cluster.launcher import cores

ROUTES = """Iface Destination Gateway Flags
eth1 0000FEA9 00000000 0001
eth0 00000000 0100000A 0003
"""


def machine(
    tmp_path: Path, *, governor: str = "performance", driver: str = "acpi-cpufreq", **speeds: int
) -> Path:
    for cpu in range(2):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{governor}\n")
        (folder / "scaling_driver").write_text(f"{driver}\n")
    for name, speed in speeds.items():
        folder = tmp_path / "class/net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text("up\n")
        (folder / "speed").write_text(f"{speed}\n")
    (tmp_path / "route").write_text(ROUTES)
    return tmp_path


@pytest.mark.parametrize(
    ("governor", "driver", "warns"),
    [
        ("performance", "acpi-cpufreq", False),
        ("schedutil", "acpi-cpufreq", False),
        ("powersave", "intel_pstate", False),
        ("powersave", "acpi-cpufreq", True),
        ("conservative", "acpi-cpufreq", True),
    ],
)
def test_a_governor_that_holds_cores_back(tmp_path: Path, governor: str, driver: str, warns: bool) -> None:
    said = machine_checks.governor(machine(tmp_path, governor=governor, driver=driver))
    assert said.startswith(f"{governor} on 2 cores") == warns
    assert bool(said) == warns


def test_a_control_group_below_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for quota, warns in ((None, False), (4.0, False), (1.5, True)):
        monkeypatch.setattr(cores, "quota_cores", lambda quota=quota: quota)
        assert ("allows 1.5 of 4 cores" in machine_checks.quota()) == warns


def test_an_interface_that_is_slow_or_not_the_fastest(tmp_path: Path) -> None:
    def said(**speeds: int) -> str:
        system = machine(tmp_path / "-".join(f"{name}{speed}" for name, speed in speeds.items()), **speeds)
        return machine_checks.interface(system, system / "route")

    assert said(eth0=10_000, eth1=1_000) == ""
    assert "leaves by eth0 with 1,000 Mbit/s, and eth1 has 25,000" in said(eth0=1_000, eth1=25_000)
    assert "eth0, which leads to other hosts, has 100 Mbit/s" in said(eth0=100)
    assert said(eth0=-1) == ""


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert machine_checks.governor(tmp_path) == ""
    assert machine_checks.interface(tmp_path, tmp_path / "route") == ""
