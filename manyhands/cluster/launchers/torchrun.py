"""torchrun, and every other launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as it does."""

from collections.abc import Mapping

from manyhands.cluster.launchers.rank_info import RankInfo, master, whole_number
from manyhands.errors import UsageError


def detect(environ: Mapping[str, str]) -> RankInfo | None:
    """The rank info that torchrun gave, if it did."""
    if "TORCHELASTIC_RUN_ID" not in environ and not {"RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    rank, size = whole_number(environ, "RANK"), whole_number(environ, "WORLD_SIZE")
    store = master(environ)
    if store is None and size > 1:
        raise UsageError(
            f"RANK={rank} and WORLD_SIZE={size} are set but MASTER_ADDR is not, so the workers cannot meet; "
            "start them with torchrun, or set MASTER_ADDR and MASTER_PORT."
        )
    agent_serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankInfo(
        rank=rank,
        size=size,
        launcher="torchrun",
        store=store if size > 1 else None,
        serves=size > 1 and rank == 0 and not agent_serves,
    )
