"""A project on top of minGPT, as a user writes one: a small GPT learns to continue counting."""

import sys

import torch
from mingpt.model import GPT, GPTConfig
from mingpt.trainer import Trainer
from torch.utils.data import Dataset

BLOCK = 8


class Counting(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = (torch.arange(BLOCK + 1) * (1 + index % 3) + index) % 10
        return numbers[:-1], numbers[1:]


def main() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(10, BLOCK, n_layer=2, n_head=2, n_embd=16))
    config = Trainer.get_default_config()
    config.num_workers, config.batch_size = 0, 16
    trainer = Trainer(config, model, Counting())

    def enough(trainer: Trainer) -> None:
        if trainer.iter_num == 24:
            print(f"loss {float(trainer.loss):.4f}")
            sys.exit(0)

    trainer.register_callback("on_batch_end", enough)
    trainer.run()


if __name__ == "__main__":
    main()
