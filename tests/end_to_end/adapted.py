"""One training, written for each adapter: `adapted.py HOW BATCH FILE` leaves the parameters in FILE.

Run by test_adapters.py with one worker, and with two that each have half of the batch.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import manyhands as mh

HOW, BATCH, FILE = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
EPOCHS, LIMIT = 2, 0.5

torch.manual_seed(0)
INPUTS = torch.randn(96, 8)
TARGETS = INPUTS.sum(1, keepdim=True)


class Pairs(Dataset):
    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": INPUTS[index], "labels": TARGETS[index]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.layers(inputs)
        return {"loss": F.mse_loss(outputs, labels), "logits": outputs}


def native(model: Net) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    session = mh.session(model, optimizer, lambda model, batch: model(**batch)["loss"], clip_norm=LIMIT)
    for _ in range(EPOCHS):
        for batch in session.batches(DataLoader(Pairs(), batch_size=BATCH)):
            session.step(batch)
    session.close()


def prepared(model: Net) -> None:
    loader = DataLoader(Pairs(), batch_size=BATCH)
    model, optimizer, loader = mh.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3), loader
    )
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
    optimizer.session.close()


def wrapped(model: Net) -> None:
    """As a script that is written for DDP has it, but for its import."""
    import os

    from manyhands.adapters.ddp import (
        DistributedDataParallel,
        DistributedSampler,
        barrier,
        destroy_process_group,
        init_process_group,
    )

    init_process_group("gloo")
    rank = int(os.environ["RANK"])
    net = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)
    sampler = DistributedSampler(Pairs(), shuffle=False)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in DataLoader(Pairs(), batch_size=BATCH, sampler=sampler):
            optimizer.zero_grad()
            net(**batch)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
            optimizer.step()
        barrier()
    destroy_process_group()


def accumulated(model: Net) -> None:
    """Two backward passes in a step."""
    model, optimizer, loader = mh.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05), DataLoader(Pairs(), batch_size=BATCH)
    )
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader):
            (model(**batch)["loss"] / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    optimizer.session.close()


def lightning(model: Net) -> None:
    import lightning

    from manyhands.adapters.lightning import ManyhandsStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)

    trainer = lightning.Trainer(
        strategy=ManyhandsStrategy(),
        accelerator="cpu",
        max_epochs=EPOCHS,
        gradient_clip_val=LIMIT,
        logger=False,
        default_root_dir=FILE.parent,
    )
    trainer.fit(Module(), DataLoader(Pairs(), batch_size=BATCH))


def trainer(model: Net) -> None:
    from manyhands.adapters.hugging_face import ManyhandsTrainer as Trainer  # isort: skip
    from transformers import TrainingArguments

    settings = TrainingArguments(
        output_dir=str(FILE.parent / "checkpoints"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=0.01,
        adam_epsilon=1e-3,
        weight_decay=0.01,
        max_grad_norm=LIMIT,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        report_to="none",
        save_strategy="epoch",
        use_cpu=True,
        disable_tqdm=True,
    )
    made = Trainer(model=model, args=settings, train_dataset=Pairs())
    made.train()


torch.manual_seed(1)
net = Net()
{
    "native": native,
    "prepared": prepared,
    "wrapped": wrapped,
    "accumulated": accumulated,
    "lightning": lightning,
    "trainer": trainer,
}[HOW](net)
if mh.rank() == 0:
    save_file({name: value.detach().clone() for name, value in net.state_dict().items()}, FILE)
