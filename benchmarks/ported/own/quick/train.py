"""A plain training script, in the way of public ones: what a quick run of the benchmark ports."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def main() -> None:
    torch.manual_seed(0)
    digits = datasets.MNIST("data", transform=transforms.ToTensor(), download=True)
    loader = DataLoader(digits, batch_size=8, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
