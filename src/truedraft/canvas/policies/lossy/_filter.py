"""The filter of Learn2PD: from the confidences of a block, which predictions are final; and its file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from truedraft.canvas._base import Predictions
from truedraft.errors import Refused, why
from truedraft.stores import _file as file

KIND, VERSION = "learn2pd filter", 1
MAKER = "truedraft train learn2pd"


class Filter(nn.Module):
    """A perceptron of two layers over the confidences of a block: (..., block) -> (..., block) logits of "is final".

    block: length of the blocks, or more than that of any.
    """

    def __init__(self, block: int, hidden: int = 64):
        super().__init__()
        self.block, self.hidden = block, hidden
        self.layers = nn.Sequential(nn.Linear(block, hidden), nn.ReLU(), nn.Linear(hidden, block))

    def forward(self, confidences: Tensor) -> Tensor:
        return self.layers(confidences)

    def save(self, path: Path) -> None:
        """Write it whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        arrays = {name: weight.detach().cpu().numpy() for name, weight in self.state_dict().items()}
        file.write(path, KIND, VERSION, {"block": self.block, "hidden": self.hidden}, arrays)

    @classmethod
    def read(cls, path: Path) -> Filter:
        """The filter in a file.

        Raises:
            Refused: there is none, or it is damaged, or of another kind or version.
        """
        config, arrays, _ = file.read(path, KIND, VERSION, MAKER)
        try:
            made = cls(config["block"], config["hidden"])
            made.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(why(error).split())
            raise Refused(
                f"{str(path)!r} does not hold the filter that it describes ({reason}): train again"
            ) from error
        return made.eval()


def confidences(predictions: Predictions, size: int) -> Tensor:
    """(size,) probability of the prediction at each position of a block, from its start on; 1 where it is known."""
    found = torch.ones(size)
    at = [predictions.positions[i] - predictions.block.start for i in predictions.inside]
    found[at] = torch.tensor([predictions.probability[i] for i in predictions.inside])
    return found
