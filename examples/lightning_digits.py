"""Lightning's Trainer with manyhands below it: one argument is different.

manyhands launch --workers 2 examples/lightning_digits.py
"""

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from manyhands import data
from manyhands.adapters.lightning import ManyhandsStrategy


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        right = self.layers(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", right.float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.003)


torch.manual_seed(0)
digits = data.load("digits")
trainer = lightning.Trainer(
    strategy=ManyhandsStrategy(),
    accelerator="cpu",
    max_epochs=3,
    gradient_clip_val=5.0,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    Classifier(),
    DataLoader(digits.train, batch_size=32, shuffle=True),
    DataLoader(digits.test, batch_size=180),
)
if trainer.is_global_zero:
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.4f}")
