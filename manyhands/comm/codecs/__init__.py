"""How gradients become fewer bytes between hosts: a table of codecs, and how their names are read."""

from manyhands import spec
from manyhands.comm.codecs.bf16 import Bf16
from manyhands.comm.codecs.codec import Codec, GarbledMessage, NoCodec
from manyhands.comm.codecs.fp8 import Fp8
from manyhands.comm.codecs.fp16 import Fp16
from manyhands.comm.codecs.int4 import Int4
from manyhands.comm.codecs.int8 import Int8
from manyhands.comm.codecs.one_bit import OneBit
from manyhands.comm.codecs.power_sgd import PowerSGD
from manyhands.comm.codecs.top_k import TopK

__all__ = ["CODECS", "DEFAULT", "Codec", "GarbledMessage", "describe", "parse"]

CODECS: dict[str, type[Codec]] = {
    "none": NoCodec,
    "fp16": Fp16,
    "bf16": Bf16,
    "fp8": Fp8,
    "int8": Int8,
    "int4": Int4,
    "one-bit": OneBit,
    "top-k": TopK,
    "power-sgd": PowerSGD,
}

DEFAULT = "none"

_KNOWN_ELSEWHERE = {
    **dict.fromkeys(("half", "float16", "fp16-compress", "compression.fp16"), "fp16"),
    **dict.fromkeys(("float8", "e4m3", "8-bit-float"), "fp8"),
    **dict.fromkeys(("bfloat16", "bf16-compress"), "bf16"),
    **dict.fromkeys(("1bit", "1-bit", "onebit", "1-bit-sgd", "signsgd"), "one-bit"),
    **dict.fromkeys(("powersgd", "low-rank"), "power-sgd"),
    **dict.fromkeys(("dgc", "topk", "deep-gradient-compression"), "top-k"),
    **dict.fromkeys(("qsgd", "8-bit", "8bit"), "int8"),
    **dict.fromkeys(("4-bit", "4bit"), "int4"),
}


def parse(text: str) -> Codec:
    """`top-k:density=0.001` → the codec with its settings."""
    return spec.parse(text, CODECS, "codec", _KNOWN_ELSEWHERE)


def describe(codec: Codec) -> str:
    """The text that `parse` turns back into this codec."""
    name = next(name for name, kind in CODECS.items() if type(codec) is kind)
    return spec.describe(codec, name)
