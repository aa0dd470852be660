"""The wheel as a user installs it: in an environment with what it declares and nothing else.

The environment has the packages that the wheel asks for, as links, so nothing is downloaded. It has neither the
packages of our tests nor the checkout: what we import and do not declare, or forget to pack, is missing there.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.end_to_end.commands import Done, clean_environment, run
from tests.pages import ROOT

pytestmark = pytest.mark.processes

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
VERSIONS = ("3.11", "3.12", "3.13")  # those that pyproject.toml names

SCRIPT = """
import torch
import manyhands as mh

model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = mh.session(model, optimizer, lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
for batch in session.batches(data, batch_size=8):
    session.step(batch)
if session.is_main:
    print("steps", session.steps, "from", mh.__file__)
"""


def built(what: str, source: Path, out: Path) -> Path:
    """What pip does to build, with the setuptools that is here."""
    done = run([sys.executable, "-W", "error", "-c", BUILD, what, str(out)], source)
    assert done.code == 0, done.err
    assert "Deprecat" not in done.err
    [path] = out.iterdir()
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From a copy, because a build writes beside its source; with folders that must stay out."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("manyhands", "tests", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    return built("build_sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From the source distribution, as on a machine for which there is no wheel."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    [source] = unpacked.iterdir()
    return built("build_wheel", source, tmp_path_factory.mktemp("wheel"))


def about(wheel: Path) -> importlib.metadata.Distribution:
    return importlib.metadata.PathDistribution(zipfile.Path(wheel, "manyhands-0.1.0.dist-info/"))


def needed(wheel: Path) -> dict[str, importlib.metadata.Distribution]:
    """What the wheel asks for, and what that asks for."""
    found: dict[str, importlib.metadata.Distribution] = {}
    missing = [*(about(wheel).requires or ())]
    while missing:
        requirement = Requirement(missing.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = importlib.metadata.distribution(name)
        missing += found[name].requires or ()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment of its own, with the wheel."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    [packages] = home.glob("lib/python*/site-packages")
    libraries = set()
    for distribution in needed(wheel).values():
        for name in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
            target = Path(str(distribution.locate_file(name)))
            libraries.add(target.parents[2])
            if not (packages / name).exists():
                (packages / name).symlink_to(target)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
    done = run([*pip, "install", "--quiet", "--no-index", "--no-cache-dir", str(wheel)], home)
    assert done.code == 0, done.err  # without an index: pip finds that all it needs is there
    (home / "libraries").write_text(os.pathsep.join(map(str, libraries)))  # where libraries beside torch lie
    return home / "bin"


def as_user(installed: Path, *command: str, cwd: Path) -> Done:
    environ = clean_environment(LD_LIBRARY_PATH=(installed.parent / "libraries").read_text())
    environ.pop("PYTHONPATH", None)
    program, *words = command
    done = run([str(installed / program), *words], cwd, environ)
    assert done.code == 0, done.err
    return done


def test_it_has_all_of_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {name for name in names if not name.startswith("manyhands-0.1.0.dist-info/")}
    assert ours == {
        str(path.relative_to(ROOT))
        for path in (ROOT / "manyhands").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"manyhands/py.typed", "manyhands/data/digits.npz", "manyhands/data/digits.md"} <= ours
    assert "manyhands-0.1.0.dist-info/licenses/LICENSE" in names


def test_it_says_what_it_is(wheel: Path) -> None:
    said = about(wheel).metadata
    assert (said["Name"], said["License-Expression"], said["Requires-Python"]) == (
        *("manyhands", "Apache-2.0"),
        f">={VERSIONS[0]}",
    )
    named = [kind.rpartition(" ")[2] for kind in said.get_all("Classifier") if " :: 3." in kind]
    assert named == list(VERSIONS)


def test_commands_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    assert as_user(installed, "manyhands", "--help", cwd=tmp_path).out.startswith("usage: manyhands")
    for what in ("models", "data", "strategies", "placements", "codecs"):
        assert as_user(installed, "manyhands", "list", what, cwd=tmp_path).out
    assert "processor" in as_user(installed, "manyhands", "doctor", cwd=tmp_path).out


@pytest.mark.parametrize(
    "options",
    [
        "--workers 2",
        "--workers 2 --placement tensor:ways=2 --model mlp",
        "--workers 2 --servers 1 --strategy parameter-server:async",
    ],
)
def test_training_with_the_installed_wheel(options: str, installed: Path, tmp_path: Path) -> None:
    asked = ["--steps", "3", "--json", "--out", "run", *options.split()]
    done = as_user(installed, "manyhands", "train", *asked, cwd=tmp_path)
    assert json.loads(done.out)["steps"] >= 3


def test_a_script_alone_and_under_launch(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    from_here = f"from {installed.parent.resolve()}"
    assert f"steps 8 {from_here}" in as_user(installed, "python", "script.py", cwd=tmp_path).out
    launch = ["manyhands", "launch", "--workers", "2", "--out", "run", "script.py"]
    assert f"steps 4 {from_here}" in as_user(installed, *launch, cwd=tmp_path).out


def interpreter(version: str) -> str | None:
    """Where it is on the path and answers, or where pyenv keeps it."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for found in filter(None, (shutil.which(f"python{version}"), *map(str, kept))):
        if subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_other_versions_of_python_compile_it_without_a_warning(
    version: str, wheel: Path, tmp_path: Path
) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no python{version} on the path or in ~/.pyenv")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = textwrap.dedent(
        """
        import pathlib
        for path in pathlib.Path("manyhands").rglob("*.py"):
            compile(path.read_bytes(), str(path), "exec")
        import manyhands, manyhands.errors, manyhands.spec  # what needs no other package
        print(manyhands.__version__)
        """
    )
    done = run([found, "-W", "error", "-c", program], tmp_path)
    assert done.code == 0, done.err
    assert done.out == "0.1.0\n"
