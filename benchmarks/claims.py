"""What README claims, and how docs/benchmarks.md is divided: words only, the numbers come from the summaries."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of README's table: one ratio of one summary."""

    says: str
    against: str
    result: str = "{}"
    """Around the number; `{went_on}` and the like are counts of the summary."""
    summary: str
    ratio: str
    of: str | None = None


DDP = "PyTorch DDP (Gloo)"
FASTER = "ours, 2 workers ÷ DDP (Gloo), 2 workers"
CLAIMS = (
    Claim(
        says="samples/s, AlexNet 3×64×64, 2 workers",
        against=DDP,
        result="{} times",
        summary="training-alexnet",
        ratio=FASTER,
    ),
    Claim(
        says="the same, MLP 3072-4096-4096-10",
        against=DDP,
        result="{} times",
        summary="training-mlp",
        ratio=FASTER,
    ),
    Claim(
        says="the same, ResNet50 3×32×32",
        against=DDP,
        result="{} times",
        summary="training-resnet50",
        ratio=FASTER,
    ),
    Claim(
        says="the same, VGG16 (one linear layer) 3×32×32",
        against=DDP,
        result="{} times",
        summary="training-vgg16",
        ratio=FASTER,
    ),
    Claim(
        says="speed of a sum of 25 MB over 2 processes",
        against="Gloo",
        result="{} times",
        summary="collectives-2",
        of="25MB",
        ratio="ours ÷ gloo",
    ),
    Claim(
        says="memory of 4 workers during the steps, AlexNet",
        against=DDP,
        result="{} of theirs",
        summary="memory",
        of="workers, during the steps",
        ratio="ours ÷ DDP",
    ),
    Claim(
        says="time from the command to the end of the first step, 2 workers",
        against="`torchrun` with DDP",
        result="{} of theirs",
        summary="startup",
        ratio="manyhands launch ÷ torchrun, DDP",
    ),
    Claim(
        says="time from `kill -9` of a worker to the end of the next step",
        against="`torchrun --max-restarts=1` with DDP",
        result="{ours_on} went on, theirs {theirs_on}; where both did, {} of their time",
        summary="recovery",
        ratio="manyhands launch ÷ torchrun --max-restarts=1, DDP, rounds in which both went on",
    ),
    Claim(
        says="time that a save stops training, AlexNet",
        against="`torch.save` and the disk",
        result="{} of theirs",
        summary="saving-alexnet",
        ratio="a save of ours stops training ÷ torch.save, and the disk",
    ),
    Claim(
        says="samples/s of an asynchronous parameter server, MLP, 2 workers",
        against="a server over torch RPC, 1 thread each",
        result="{} times",
        summary="strategies-servers-mlp",
        ratio="ours ÷ torch RPC server",
    ),
)

# In the page's order. A summary belongs to the longest prefix of its name.
FAMILIES = {
    "training": (
        "Training",
        "Contenders live at once and take turns of a few steps, of which the first does not count. "
        'Batch 32 per worker, SGD with momentum, single precision. "No communication" is two '
        'unconnected processes; "2 threads" is one process of plain PyTorch with batch 64. Ours can '
        'survive a death unless it says "if one\'s death were the end".',
    ),
    "training-earlier": (
        "Training, earlier runs",
        "Older code or an older method, kept to show how far runs of one benchmark differ.",
    ),
    "before": (
        "Ours beside ours as it was",
        "The same jobs by the code of this commit and of an earlier one, in turns.",
    ),
    "adapters": (
        "Adapters",
        "Other people's loops on top of the session beside the session's own step: the same model, data "
        "and loader, in turns, in one environment. Without us is one process of the package itself. "
        "Processor time is that of all workers for one step.",
    ),
    "checks": (
        "Looking at people's own code",
        "What a session looks at before the first step and in every step, by itself, and a start beside "
        "that of an earlier commit.",
    ),
    "collectives": (
        "Sums over the processes of one host",
        'Ratios are of speeds: above 1 ours is faster. "Ours" sums a vector in the host\'s memory '
        '(`world.comm.vector`), as replicas have theirs; "ordinary memory" is copied there and back.',
    ),
    "startup": ("Start", "Both run a small MLP with 2 workers; below 1 ours is quicker."),
    "memory": (
        "Memory",
        "The sum of the proportional set sizes of the workers: a page that several processes map "
        "counts once.",
    ),
    "recovery": (
        "Recovery",
        "One of two workers is killed at a random instant; ours and theirs take turns. The clock "
        "runs from the `kill -9` to the end of the next step of any surviving or restarted worker.",
    ),
    "saving": (
        "Saving",
        "Two workers train, save, copy and `torch.save` in turns. The disk is that of the machine.",
    ),
    "telemetry": (
        "Records of every step",
        "Every call that a step makes, timed by itself; and whole steps with and without records.",
    ),
    "diagnosis": (
        "Diagnosis",
        "Faults are put into small runs, and the first sentence of `manyhands doctor RUN` has to name the "
        "process and the cause. Compute is paced; hosts are emulated. What other programs on the machine "
        "use is left out.",
    ),
    "attacks": (
        "Attacks",
        "Two emulated hosts train, each with a worker and a server; a process without a key on a third "
        "one attacks the ports that have keys for some seconds and is quiet for as long, in turns within "
        "one run. All of them share the cores of one machine, so speed also pays for the attacker's own "
        "processor time.",
    ),
    "soak": (
        "Long runs",
        "Sums over all processes of a run of a tiny model: the median of the last fifth of the run "
        "beside that of the second fifth. What a long run leaves on the disk stands beside the bound of "
        "[commands](commands.md#a-run).",
    ),
    "extremes": (
        "Unusual sizes",
        "Ours beside one process of plain PyTorch that makes the same batches with all cores.",
    ),
    "strategies-servers": (
        "Parameter servers",
        "One asynchronous server and 2 workers share the cores of one host. The server over torch RPC "
        "is that of PyTorch's tutorial on batches of calls, with 1 thread per process or with as many "
        "as PyTorch takes by itself.",
    ),
    "strategies-traffic": (
        "Traffic between emulated hosts",
        "Bytes are those that the kernel counted on each host's interface, headers included. The "
        "emulated hosts share the cores of one machine.",
    ),
    "strategies-hiding": (
        "Late gradients",
        "How much of a sum `double-buffer` hides behind compute that is longer than the sum.",
    ),
    "strategies-stragglers": (
        "Slow workers",
        "Compute is paced, and the same steps of the same workers are slow for all contenders.",
    ),
    "strategies-accuracy": (
        "Accuracy",
        "Every set-up trains on the digits within the budget of [comparing fairly](comparing-fairly.md), "
        "once per seed.",
    ),
    "porting": (
        "People's own scripts",
        "Public scripts at named commits, changed by patches that hold no line of them. A changed line "
        "counts once. Ours stands beside a DDP form of the same script, which runs under torchrun. Data "
        "is tiny and made up; torchvision and what else is not there are stand-ins, for the original "
        "as for its port. Under synchronous ways the port is compared with the original in one process "
        "of plain PyTorch on the same samples: the largest relative difference of a parameter after 20 "
        "steps, without dropout, with the same noise for all samples, and in double precision where the "
        "script allows it.",
    ),
    "placements-pipeline": (
        "Pipelines",
        "2 workers with 1 thread each beside one worker with 1 thread. Idle time stands beside "
        "(p−1)/(m+p−1) for p stages and m microbatches.",
    ),
    "placements-shards": ("Shards", "The largest worker's peak beside a whole replica."),
    "placements-equality": ("Equality of placements", "Each placement beside one process."),
}
