"""What a codec can be combined with: it is for gradients that hosts sum in every step."""

from manyhands.comm import codecs
from manyhands.comm.codecs import Codec
from manyhands.errors import UsageError
from manyhands.strategies.interface import Strategy


def admit_codec(
    codec: Codec, strategy: Strategy, name: str, *, members: int = 1, device: str = "cpu"
) -> None:
    """Refuse, before any process starts, what cannot be coded; `members` are the workers of one replica."""
    asked, traits = codecs.describe(codec), strategy.traits
    if asked == codecs.DEFAULT:
        return
    if traits.servers is not None or not traits.synchronous or traits.replica != "shared":
        what = (
            "what workers and servers exchange"
            if traits.servers is not None
            else "what its replicas exchange"
        )
        raise UsageError(
            f"--codec {asked} codes the gradients that hosts sum in every step, and {what} under {name} is no such "
            "sum; use --strategy all-reduce without a topology, or leave --codec out"
        )
    if members > 1:
        raise UsageError(
            f"--codec {asked} codes the gradients of whole models, and this placement divides a replica among "
            f"{members} workers; leave out --codec or --placement"
        )
    if device != "cpu":
        raise UsageError(
            f"--codec {asked} codes on CPUs, not on {device}; leave --codec out, or use --device cpu"
        )


def admit_momentum(codec: Codec, optimizer: str, settings: str) -> None:
    """Refuse momentum after a sparse sum; `settings` are those that make it."""
    if codec.is_sparse and settings:
        raise UsageError(
            f"--codec {codecs.describe(codec)} sends an element once in many steps, and {optimizer} with {settings} "
            "would carry that on as if it came in each (Lin et al. 2018); use --optimizer sgd:momentum=0, or a codec "
            "that sends all elements, as one-bit"
        )
