"""Run cells in a real Jupyter kernel: python cells.py CELLS.json, or a notebook: python cells.py NOTEBOOK.ipynb

Prints what came of every cell as JSON. A cell is its code, or its code and what it prints before it is interrupted.
"""

import json
import sys
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient


def run(cells: list[Any]) -> list[dict[str, str]]:
    manager = KernelManager()
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        return [_cell(manager, client, *([one] if isinstance(one, str) else one)) for one in cells]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _cell(manager: Any, client: Any, code: str, interrupt_at: str | None = None) -> dict[str, str]:
    found = {"stdout": "", "stderr": "", "shown": "", "value": "", "error": "", "said": ""}

    def hear(message: dict[str, Any]) -> None:
        nonlocal interrupt_at
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "stream":
            found[content["name"]] += content["text"]
        elif kind == "update_display_data":
            found["shown"] += content["data"]["text/plain"] + "\n"
        elif kind == "execute_result":
            found["value"] = content["data"]["text/plain"]
        elif kind == "error":
            found["error"], found["said"] = content["ename"], content["evalue"]
        if interrupt_at is not None and interrupt_at in found["stdout"]:
            interrupt_at = None
            manager.interrupt_kernel()

    client.execute_interactive(code, timeout=90, output_hook=hear)
    return found


def execute(path: str) -> list[dict[str, str]]:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=90).execute()
    return [
        {"stdout": "".join(one["text"] for one in cell.outputs if one.output_type == "stream")}
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


if __name__ == "__main__":
    (given,) = sys.argv[1:]
    if given.endswith(".ipynb"):
        print(json.dumps(execute(given)))
    else:
        with open(given) as file:
            print(json.dumps(run(json.load(file))))
