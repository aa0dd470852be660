"""Steps in whose passes workers meet, since a layer normalises over the samples of all of them."""

from collections.abc import Iterator
from contextlib import contextmanager

from manyhands.engine.engine import Engine
from manyhands.engine.handshake import UPDATE, Handshake


@contextmanager
def joint_passes(engine: Engine, handshake: Handshake | None, passes: int) -> Iterator[bool]:
    """All workers are about to compute so many passes each; says whether they meet in them."""
    joint = engine.siblings.joint
    if not joint.is_on or handshake is None or UPDATE in handshake.wait().purposes:
        yield False
        return
    joint.begin(engine.number, engine.world, passes)
    engine.replica.meet_in_passes(joint.passing)
    try:
        yield True
    finally:
        engine.replica.meet_in_passes(None)
