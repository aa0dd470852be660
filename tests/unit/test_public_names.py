"""`import manyhands as mh` offers every public name, and loads none of them before it is used."""

import inspect
import json
import subprocess
import sys

import pytest

import manyhands as mh
from manyhands.checkpoint.publish import KEEP
from manyhands.engine.intervals import NEVER

pytestmark = pytest.mark.processes

FRESH = """
import json, sys
import manyhands as mh
offered, loaded = dir(mh), sorted(name for name in sys.modules if name.startswith("manyhands."))
heavy = [name for name in ("torch", "numpy") if name in sys.modules]
found = getattr(mh, {name!r})
print(json.dumps([offered, loaded, heavy, getattr(found, "__name__", found)]))
"""


@pytest.mark.parametrize("name", ["RunFailed", "data", "errors", "models", "rank", "strategies"])
def test_a_name_is_there_after_a_plain_import(name: str) -> None:
    code = FRESH.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    offered, loaded, heavy, found = json.loads(done.stdout)
    assert set(mh.__all__) <= set(offered), "what completion offers"
    assert loaded == heavy == []
    assert found in (name, f"manyhands.{name}")


def test_every_offered_name_is_there() -> None:
    assert set(dir(mh)) == set(mh.__all__)
    assert [name for name in dir(mh) if not hasattr(mh, name)] == []


def test_a_name_that_is_not_there_is_refused_as_everywhere_in_python() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        mh.nothing  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(mh, "_nothing")


def test_the_defaults_that_help_shows_are_those_of_the_parts() -> None:
    """Written as values, for help() and the Python reference."""
    parameters = inspect.signature(mh.session).parameters
    assert parameters["save_every"].default == NEVER
    assert parameters["keep"].default == KEEP
