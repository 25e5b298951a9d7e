"""What is not a number, found where it arises: one method's NaN must not end the rows beside it, nor go unnoticed.

What is found is noted on the device in every layer and asked for once a step, together with what a decode step waits for anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PROBLEMS = ("scores that are not numbers", "outputs that are not finite")


class Health:
    """Watches the scores and outputs of all rows of a batch. A method is not to blame where its query was not finite already.

    Args:
        rows: Of the batch.
        devices: Of every layer.
    """

    def __init__(self, rows: int, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._found = {device: torch.zeros(3, len(devices), rows, device=device) for device in dict.fromkeys(devices)}

    def watch_query(self, layer: int, query: Tensor) -> None:
        """Note a layer's queries ``[R, H, G, D]``."""
        torch.sum(query, (1, 2, 3), dtype=torch.float32, out=self._found[self._devices[layer]][2, layer])

    def watch_scores(self, layer: int, scores: Tensor) -> None:
        """Note a layer's scores ``[R, H, G, N]``: a row's largest is not a number where any of it is none."""
        torch.amax(scores, (1, 2, 3), out=self._found[self._devices[layer]][0, layer])

    def watch_rank(self, layer: int, rows: slice, broken: Tensor) -> None:
        """Note which of a layer's rows are selected by scores of their method's own that are not numbers, boolean ``[R]``."""
        self._found[self._devices[layer]][0, layer, rows].masked_fill_(broken, torch.nan)

    def watch_output(self, layer: int, output: Tensor) -> None:
        """Note a layer's outputs ``[R, H, G, D]``, and put 0 in place of what is not finite: a store would refuse to seal such keys."""
        torch.sum(output, (1, 2, 3), out=self._found[self._devices[layer]][1, layer])
        output.nan_to_num_(0.0, 0.0, 0.0)

    def broken(self, device: torch.device) -> Tensor:
        """Rows that were not well in the last step, boolean ``[R]`` on this device. The device is not waited for."""
        parts = [_flags(found).any(1).any(0).to(device) for found in self._found.values()]
        return parts[0] if len(parts) == 1 else torch.stack(parts).any(0)

    def problems(self) -> dict[int, tuple[int, str]]:
        """The first layer of each such row, and what was wrong there. Waits for the devices."""
        found: dict[int, tuple[int, str]] = {}
        for flags in (_flags(one).cpu() for one in self._found.values()):
            for layer, row, kind in flags.permute(1, 2, 0).nonzero().tolist():
                if row not in found or layer < found[row][0]:
                    found[row] = (layer, _PROBLEMS[kind])
        return found


def _flags(found: Tensor) -> Tensor:
    return torch.stack([found[0].isnan(), ~found[1].isfinite()]) & found[2].isfinite()
