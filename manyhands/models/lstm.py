"""A recurrent language model: one module per layer, so that layers can live on different workers."""

from collections import OrderedDict

from torch import Tensor, nn

from manyhands.models import checks


def lstm(shape: tuple[int, ...], classes: int, *, layers: int = 2, width: int = 256) -> nn.Module:
    """LSTM language model (Hochreiter & Schmidhuber 1997; stacked as in Zaremba et al. 2014)."""
    checks.tokens("lstm", shape)
    checks.positive("lstm", layers=layers, width=width)
    parts = OrderedDict[str, nn.Module](embedding=nn.Embedding(classes, width))
    for number in range(1, layers + 1):
        parts[f"layer{number}"] = Recurrent(width)
    parts["head"] = nn.Linear(width, classes)
    return nn.Sequential(parts)


class Recurrent(nn.Module):
    """One LSTM layer over a whole sequence, from an empty state: [batch, length, width] → the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        # Open forget gates (Gers et al. 1999): otherwise half of the state is lost at every token.
        nn.init.ones_(self.lstm.get_parameter("bias_ih_l0").detach()[width : 2 * width])

    def forward(self, sequence: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(sequence)[0]
        return outputs
