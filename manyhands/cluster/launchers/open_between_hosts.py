"""What a person should know before a run has several hosts: which of its ports are open."""


def sentence(store: str) -> str:
    """`store` says where PyTorch's store listens, or will."""
    return (
        f"between hosts, PyTorch's store ({store}) and Gloo (a free port of every worker) listen without keys: every "
        "process that reaches them can change this run or end it, so use a network of your own; "
        "`manyhands doctor RUN` names the ports"
    )
