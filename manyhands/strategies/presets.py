"""Classic systems that are a configuration of a strategy: a name for it, and where it comes from."""

from typing import NamedTuple


class Preset(NamedTuple):
    """What the name stands for; settings given after the name come on top."""

    strategy: str
    line: str
    paper: str


PRESETS: dict[str, Preset] = {
    "ring": Preset(
        "all-reduce:topology=ring",
        "Each worker sends 2(N−1)/N of the gradient, to its neighbour only",
        "Baidu 2017; Horovod, Sergeev & Del Balso 2018",
    ),
    "tree": Preset(
        "all-reduce:topology=tree",
        "Gradients are added up along a tree, in 2·log2 N rounds",
        "FireCaffe, Iandola et al. 2016",
    ),
    "hierarchical": Preset(
        "all-reduce:topology=hierarchical",
        "Add up inside each host, then a ring between hosts",
        "ChainerMN, Akiba et al. 2017",
    ),
    "local-first": Preset(
        "all-reduce",
        "The fastest way inside each host; averaged gradients between hosts, once per step",
        "Lerat et al.",
    ),
    "two-level": Preset(
        "parameter-server:consistency=async,cache=true",
        "Synchronous inside a host, which pushes one sum to the servers; hosts do not wait for each other",
        "MXNet's KVStore, Chen et al. 2015",
    ),
    "stale": Preset(
        "parameter-server:consistency=stale",
        "Servers that let a worker be at most `bound` steps ahead of the slowest",
        "Ho et al. 2013; Petuum, Xing et al. 2015",
    ),
    "parameter-averaging": Preset(
        "local-sgd:period=5",
        "Train on partitions, average the parameters, repeat: iterative map-reduce",
        "Deeplearning4j; McDonald et al. 2010",
    ),
}
