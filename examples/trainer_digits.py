"""Hugging Face's Trainer with manyhands below it: one import is different.

manyhands launch --workers 2 examples/trainer_digits.py
"""

import tempfile

import torch
import torch.nn.functional as F

from manyhands import data
from manyhands.adapters.hugging_face import ManyhandsTrainer as Trainer  # before TrainingArguments

from transformers import TrainingArguments  # isort: skip


class Digits(torch.utils.data.Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        inputs, target = self.pairs[index]
        return {"inputs": inputs, "labels": target}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def forward(self, inputs, labels):
        outputs = self.layers(inputs)
        return {"loss": F.cross_entropy(outputs, labels), "logits": outputs}


torch.manual_seed(0)
digits = data.load("digits")
kept = tempfile.TemporaryDirectory()  # the Trainer makes one; this example saves nothing into it
settings = TrainingArguments(
    output_dir=kept.name,
    per_device_train_batch_size=32,
    num_train_epochs=3,
    learning_rate=0.003,
    lr_scheduler_type="constant",
    report_to="none",
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(
    model=Classifier(),
    args=settings,
    train_dataset=Digits(digits.train),
    eval_dataset=Digits(digits.test),
    compute_metrics=lambda found: {
        "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())
    },
)
trainer.train()
result = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"accuracy {result['eval_accuracy']:.4f}")
kept.cleanup()
