"""The public scripts that are ported: where they are, and how they run on tiny data."""

from dataclasses import dataclass
from pathlib import Path

PORTED = Path(__file__).parent / "ported"
EXAMPLES, TUTORIAL = "pytorch/examples", "yunjey/pytorch-tutorial"
OURS, DDP, REFERENCE = "ours", "ddp", "reference"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of a repository. Repositories that were forked share their commits, so a commit may be a fork's."""

    path: str
    commit: str
    blob: str


@dataclass(frozen=True, kw_only=True)
class Script:
    name: str
    about: str
    repository: str
    sources: tuple[Source, ...]
    """The first is the one that is changed."""
    options: tuple[str, ...] = ()
    starts: str = ""
    """What is started, if that is not the changed file: a project of ours on top of a library."""
    own: str = ""
    """A folder of ours with what stands in for parts of the repository."""
    samples: int = 256
    epochs: int = 0
    """The runner ends the script after so many epochs, where its own number is too large."""
    whole: bool = False
    """Every worker computes on all of the data, or on rows of its own: one process needs no larger batch."""
    single: bool = False
    """Compared in single precision, because the script says so itself."""
    batch: int = 0
    """That of one worker, where the script has it as a constant: the reference is told how large it is instead."""
    is_for_ddp: bool = False
    """As it is published: what its DDP form changes is only that it runs on a CPU."""
    batch_option: str = ""
    """How the reference is told, where the script takes it as an option."""
    note: str = ""

    @property
    def changed(self) -> Source:
        return self.sources[0]

    @property
    def folder(self) -> Path:
        """Where the changed file is inside its repository."""
        return Path(self.changed.path).parent

    def patch(self, form: str) -> str | None:
        path = PORTED / "patches" / f"{self.name}.{form}.ed"
        return path.read_text() if path.exists() else None


def _examples(path: str, commit: str, blob: str) -> tuple[Source, ...]:
    return (Source(path=path, commit=commit, blob=blob),)


SCRIPTS = (
    Script(
        name="mnist",
        about="a convolutional net",
        repository=EXAMPLES,
        sources=_examples(
            "mnist/main.py",
            "f15fac72e01158bcb704dded7c7e511f7a712a5f",
            "6a7060848e3571f4e56e486b7d8a902a4fd97666",
        ),
        options=("--epochs", "3", "--batch-size", "16"),
    ),
    Script(
        name="mnist_rnn",
        about="LSTM, batch norm, a scheduler",
        repository=EXAMPLES,
        sources=_examples(
            "mnist_rnn/main.py",
            "d9a71134a8f9ef0565a6b1582df47ec3fd5280d9",
            "2fa64c00d6d7da4dc9d9a9968c71d41073ddfd12",
        ),
        options=("--epochs", "3", "--batch-size", "16", "--save-model"),
    ),
    Script(
        name="vae",
        about="a variational autoencoder; its loss is a sum",
        repository=EXAMPLES,
        sources=_examples(
            "vae/main.py",
            "cd01f93000a6679e768700dd29e417a1e5fd10e5",
            "6286592184dc2d71214303b868ef77e3da936954",
        ),
        options=("--epochs", "3", "--batch-size", "16"),
        batch=16,
        batch_option="--batch-size",
    ),
    Script(
        name="dcgan",
        about="a GAN: two models, two optimizers",
        repository=EXAMPLES,
        sources=_examples(
            "dcgan/main.py",
            "13caa078cd69d74ffb447a9eda09f0a81b809480",
            "2f45b2dbd24e6f3e4cd75160d61380def1690b02",
        ),
        options=(
            *("--dataset", "fake", "--niter", "3", "--batchSize", "8", "--ngf", "4", "--ndf", "4"),
            *("--nz", "8", "--workers", "0", "--manualSeed", "1"),
        ),
        samples=128,
    ),
    Script(
        name="gcn",
        about="a graph net on one graph",
        repository=EXAMPLES,
        sources=_examples(
            "gcn/main.py",
            "83ff2f5402fff5054675a3334685382745fe1df4",
            "5c8362b5765627486dee5478e241115c9e6f9a67",
        ),
        options=("--epochs", "22", "--val-every", "5"),
        whole=True,
        single=True,
        note="all workers train on the whole graph",
    ),
    Script(
        name="time_sequence",
        about="LSTM cells, L-BFGS",
        repository=EXAMPLES,
        sources=_examples(
            "time_sequence_prediction/train.py",
            "e27e2585a5b6a557e3512c3f5bd742ff4850f364",
            "2ccc85dc5a8f340c632bfa307e7b049d9fc2286e",
        ),
        options=("--steps", "20"),
        whole=True,
        note="all workers train on all of the data",
    ),
    Script(
        name="vit",
        about="a vision transformer",
        repository=EXAMPLES,
        sources=_examples(
            "vision_transformer/main.py",
            "5921fc191b83df2451c342b8bb30b5e3d8891ff8",
            "31b8111e04166fc0eed1bdaf4be9cd8655b00b7a",
        ),
        options=(
            *("--epochs", "2", "--batch-size", "4", "--img-size", "32", "--patch-size", "8", "--lr", "0.001"),
            *("--latent-size", "16", "--num-heads", "2", "--num-encoders", "2", "--weight-decay", "0"),
        ),
        samples=128,
        note="has parameters as large as the batch; without weight decay, by which Adam makes the rounding of "
        "gradients that are zero (the keys' biases) a thousand times larger in every step",
    ),
    Script(
        name="ddp_tutorial",
        about="the form that PyTorch's DDP tutorial begins with",
        repository=EXAMPLES,
        sources=(
            Source(
                path="distributed/ddp-tutorial-series/single_gpu.py",
                commit="2572f268b0cbe6dd08d8dcc695d6bf03eefdc061",
                blob="e91ab81cc1158b515d132214dabcf3d3895a6916",
            ),
            Source(
                path="distributed/ddp-tutorial-series/datautils.py",
                commit="f45e418444b572ee5c782b90a0c2cae2489208bc",
                blob="22c364eaa0d36bdcb5726f9f23972fe6b5d50615",
            ),
        ),
        options=("2", "1", "--batch_size", "64"),
        note="one changed line puts it on the CPU, in both forms; its loss is always 0",
    ),
    Script(
        name="cifar",
        about="SGD with momentum, cosine schedule, best accuracy kept",
        repository="kuangliu/pytorch-cifar",
        sources=_examples(
            "main.py", "7ad1b9c745bebd47a273a606bfea9a8749a3bee7", "05ca1eb9076ba7c4fa405001a4aebc834f2c27a2"
        ),
        own="cifar",
        samples=2048,
        epochs=3,
        note="with a small model of ours",
    ),
    Script(
        name="language_model",
        about="LSTM, hidden states kept over batches",
        repository=TUTORIAL,
        sources=(
            Source(
                path="tutorials/02-intermediate/language_model/main.py",
                commit="401b9035df445bb87ebc5f893365657fe0794126",
                blob="ef135bb7f99a47be88827eb1c09252451c394e5e",
            ),
            Source(
                path="tutorials/02-intermediate/language_model/data_utils.py",
                commit="78c6afe681c4ff5095ef13662c02a7e369b1bcbd",
                blob="91bc6053bedc0c442100a7b995abc7913ba74c6e",
            ),
        ),
        batch=20,
        note="a worker has rows of the text",
    ),
    Script(
        name="birnn",
        about="a bidirectional LSTM",
        repository=TUTORIAL,
        sources=_examples(
            "tutorials/02-intermediate/bidirectional_recurrent_neural_network/main.py",
            "78c6afe681c4ff5095ef13662c02a7e369b1bcbd",
            "a0ecd77347d59005c23d359d36a3663684e2ba0a",
        ),
        samples=2000,
    ),
    Script(
        name="resnet",
        about="residual blocks, batch norm",
        repository=TUTORIAL,
        sources=_examples(
            "tutorials/02-intermediate/deep_residual_network/main.py",
            "22219527c5453cc7897d763844d633aa2f2d963e",
            "69dbe5fb0efa5e455c694af80c0378773fce19c7",
        ),
        samples=200,
    ),
    Script(
        name="gan",
        about="a GAN of linear layers",
        repository=TUTORIAL,
        sources=_examples(
            "tutorials/03-advanced/generative_adversarial_network/main.py",
            "78c6afe681c4ff5095ef13662c02a7e369b1bcbd",
            "34f41274171f2770804e143f692580c73da884f6",
        ),
        samples=200,
        batch=100,
    ),
    Script(
        name="mingpt",
        about="the trainer of a library, a GPT, clipping",
        repository="karpathy/minGPT",
        sources=(
            Source(
                path="mingpt/trainer.py",
                commit="00aa9cb2edfd85f4bd80d256838ed7eec3088921",
                blob="7cd5fd136e0133da4f4b637beb645569d92493a2",
            ),
            Source(
                path="mingpt/model.py",
                commit="bbbdac74fa9b2e55574d70056163ffbae42310c1",
                blob="758f0c0bbf0422a45cf4e143ac8199adde544917",
            ),
        ),
        starts="counting.py",
        own="mingpt",
        note="under a project of ours; its model is an older one",
    ),
    Script(
        name="nanogpt",
        about="a GPT, accumulation, clipping, a GradScaler; it is for DDP already",
        repository="karpathy/nanoGPT",
        sources=(
            Source(
                path="train.py",
                commit="e2221318e607eb5ee0669d6b7641af25a2111545",
                blob="d758fb0882187bbe7d25fed942c788148fc7dc2b",
            ),
            Source(
                path="model.py",
                commit="04a1d697ddc57aadb2edbe95816bf86c6b8918b0",
                blob="0305daf9f7f4073d808a6957e43d8d358f869555",
            ),
            Source(
                path="configurator.py",
                commit="1e016ae069026ccf6e27c09d172f0b8cfd7482b4",
                blob="f8489c5fb71a60e773e4ecf2289cd675646a5012",
            ),
        ),
        options=(
            *("--device=cpu", "--dtype=float32", "--compile=False", "--wandb_log=False", "--backend=gloo"),
            *(
                "--dataset=tiny",
                "--block_size=16",
                "--batch_size=4",
                "--n_layer=2",
                "--n_head=2",
                "--n_embd=16",
            ),
            *("--max_iters=22", "--eval_interval=10", "--eval_iters=2", "--gradient_accumulation_steps=2"),
            *("--warmup_iters=0", "--lr_decay_iters=22"),
        ),
        whole=True,
        is_for_ddp=True,
        note="for DDP as it is published, with 23 lines for it, and here by another import; its batches are drawn at "
        "random",
    ),
)
# What a quick run ports: a script of ours, whose source is here.
QUICK = Script(
    name="quick",
    about="a linear layer",
    repository="",
    sources=(Source(path="train.py", commit="", blob="8395a3361aecd63eb7c185561e95c84ee00be035"),),
    own="quick",
    samples=176,
)
BY_NAME = {script.name: script for script in (*SCRIPTS, QUICK)}
