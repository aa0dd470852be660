"""What `launch` runs: a script or a module, and what a person may have meant where it can be neither."""

import argparse
import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from manyhands.errors import UsageError

SPECS = (".toml", ".json")


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    words: list[str]
    """As `python` would get them."""
    name: str
    """For the run's directory."""


def command_of(options: argparse.Namespace) -> ScriptCommand:
    """What to run, by the command line."""
    if options.module is not None:
        if not options.module:
            raise UsageError("name the module to run, as in manyhands launch -m package.module")
        _refuse_file(options.module[0])
        return ScriptCommand(words=["-m", *options.module], name=options.module[0].rpartition(".")[2])
    if options.script is None:
        raise UsageError("name the script to run, as in manyhands launch script.py")
    script = Path(options.script)
    _refuse(script)
    return ScriptCommand(words=[str(script), *options.arguments], name=script.stem)


def _refuse_file(module: str) -> None:
    """Whatever is no name of a module, most of all the path of a file."""
    path = (
        Path(module) if os.sep in module else Path(*module.removesuffix(".py").split(".")).with_suffix(".py")
    )
    is_file = module.endswith(".py") or os.sep in module
    if not is_file and all(part.isidentifier() for part in module.split(".")):
        return
    meant = ""
    if is_file:
        name = ".".join(path.with_suffix("").parts)
        meant = f"; did you mean -m {name}, or {path} without -m?" if path.is_file() else ""
    raise UsageError(f"'{module}' is no name of a module, as in manyhands launch -m package.module{meant}")


def _refuse(script: Path) -> None:
    """Whatever is no script."""
    if script.is_dir():
        way = f"-m {script.name}" if (script / "__main__.py").exists() else "a Python file in it"
        raise UsageError(f"'{script}' is a directory; give {way}")
    if script.parts[:2] in (("/", "dev"), ("/", "proc")):
        raise UsageError(
            f"'{script}' is an input of this command alone, and every worker reads the script by itself; write it to "
            "a file, and give that"
        )
    if not script.is_file():
        raise UsageError(
            f"there is no script '{script}' here; give the path of a Python file{_meant(script)}"
        )
    if script.suffix == ".ipynb":
        raise UsageError(
            f"'{script}' is a notebook, and workers run scripts; call mh.run(function, workers=2) in it, or write it "
            f"out with `jupyter nbconvert --to script {script}`, and launch {script.with_suffix('.py').name}"
        )
    if script.suffix in SPECS:
        raise UsageError(f"'{script}' is a spec file and no script; use manyhands train {script}")


def _meant(script: Path) -> str:
    try:
        there = [path.name for path in script.parent.iterdir() if path.suffix == ".py"]
    except OSError:
        return ""
    found = difflib.get_close_matches(script.name, there, 1, 0.7)
    if found:
        return f"; did you mean {script.with_name(found[0])}?"
    module = Path(*str(script).split(".")).with_suffix(".py")
    return f"; did you mean -m {script}?" if "." in str(script) and module.exists() else ""


def is_script(text: str) -> bool:
    """Whether a word of the command line names a script, where something else is wanted."""
    return text.endswith(".py")
