"""What a person should know before a run has several hosts: which of its ports are open."""


def sentence(store: str) -> str:
    """`store` says where PyTorch's store listens, or will."""
    return (
        f"while hosts meet, PyTorch's store ({store}) and Gloo (free ports of every worker) listen without keys, and "
        "what they send later is not encrypted: every process that reaches them then, or is between the hosts, can "
        "change this run or end it, so use a network of your own; `manyhands doctor RUN` names the ports"
    )
