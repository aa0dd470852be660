"""The graph of a run's model, as `manyhands show` gives it: computed by that command, once for each plan."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from manyhands.dashboard.choices import refuse_code
from manyhands.dashboard.run_list import read_json
from manyhands.errors import ManyhandsError, UsageError
from manyhands.job.known_names import DATA, MODELS

LONGEST_S = 120.0

_known: dict[tuple[str, str], dict[str, Any]] = {}


async def graph_of(run: Path, *, allow_code: bool) -> dict[str, Any]:
    """Nodes and edges of the model that the run's plan names, for the data that it names."""
    plan = read_json(run / "plan.json") or {}
    model, data = plan.get("model"), plan.get("data")
    if not isinstance(model, str) or not isinstance(data, str):
        raise UsageError("this run has no plan that names a model, so there is no graph of it")
    refuse_code("model", model, MODELS, allow_code=allow_code)
    refuse_code("data", data, DATA, allow_code=allow_code)
    if (model, data) not in _known:
        _known[model, data] = await _shown(model, data)
    return _known[model, data]


async def _shown(model: str, data: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "manyhands", "show", "--json", "--time", "--data", data, "--", model),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LONGEST_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ManyhandsError(err.decode(errors="replace").strip().removeprefix("error: ")[-1000:])
    graph: dict[str, Any] = msgspec.json.decode(out)
    return graph
