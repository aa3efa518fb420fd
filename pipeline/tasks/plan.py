"""What a task tells the export stage about one method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.export import Dim

from pipeline.caches import DeviceCache

DynamicAxes = dict[int, Dim]


@dataclass(frozen=True)
class MethodPlan:
    """How one method is traced: the model's own ``forward`` with these keyword arguments."""

    name: str  # of the method in the program
    kwargs: dict[str, torch.Tensor | DeviceCache | int]
    dynamic_shapes: dict[str, DynamicAxes | list[None] | None]
    cache: str  # the keyword argument that is the cache
    input_names: dict[str, str]  # placeholder -> name of the input in the program
    outputs: tuple[str, ...]  # fields of the model's output to keep, in this order
