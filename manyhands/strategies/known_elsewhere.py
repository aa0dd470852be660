"""Names that people bring from other systems, and what they are called here."""

_SHARDED = "--placement sharded"
_PIPELINE = "--placement pipeline"
_TENSOR = "--placement tensor"

KNOWN_ELSEWHERE = {
    **dict.fromkeys(("ddp", "distributed-data-parallel", "distributeddataparallel", "dp"), "all-reduce"),
    **dict.fromkeys(
        ("data-parallel", "bsp", "sync", "synchronous", "nccl", "gloo", "mirrored"), "all-reduce"
    ),
    **dict.fromkeys(("horovod", "baidu-allreduce"), "ring"),
    **dict.fromkeys(("fsdp", "fsdp2", "fully-sharded", "zero", "deepspeed"), _SHARDED),
    **dict.fromkeys(("zero1", "zero2", "zero3", "zero-1", "zero-2", "zero-3", "sharded"), _SHARDED),
    **dict.fromkeys(("pipeline", "pp", "gpipe", "pipedream", "model-parallel"), _PIPELINE),
    **dict.fromkeys(("tensor", "tp", "megatron", "tensor-parallel"), _TENSOR),
    **dict.fromkeys(("hybrid", "3d"), "--placement hybrid"),
    **dict.fromkeys(("ps", "param-server", "byteps"), "parameter-server"),
    **dict.fromkeys(("async", "asynchronous", "asgd", "async-sgd"), "parameter-server:async"),
    **dict.fromkeys(("ssp", "petuum", "bounded-staleness"), "stale"),
    **dict.fromkeys(("easgd", "eamsgd", "elastic"), "elastic-averaging"),
    **dict.fromkeys(("fedavg", "federated", "post-local-sgd", "postlocalsgd", "localsgd"), "local-sgd"),
    **dict.fromkeys(("bmuf", "slowmo"), "block-momentum"),
    **dict.fromkeys(("sgp", "push-sum", "dsgd", "decentralized", "bluefog"), "gossip"),
    **dict.fromkeys(("spark", "dl4j", "iterative-mapreduce"), "parameter-averaging"),
    "singa": "worker-groups",
    "adpsgd": "ad-psgd",
    "distbelief": "downpour",
    "opendiloco": "diloco",
    "ltfb": "tournament",
    "lbfgs": "sandblaster",
}
