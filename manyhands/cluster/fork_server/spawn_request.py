"""What the launcher tells the fork server, and the workers that come from it."""

import msgspec

GO = b"!"
"""The launcher writes it to a worker's `permission`: the worker may begin."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker begins with."""

    environ: dict[str, str]
    output: (
        int  # file descriptors: standard output, standard error, and where the launcher permits it to begin
    )
    error: int
    permission: int
    stack: int  # and where it writes its Python stack


class SpawnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that the fork server should start."""

    load: str  # the module to import before the first fork
    command: list[str]
    specs: list[WorkerSpec]
    stdin: int  # the standard input of all of them
