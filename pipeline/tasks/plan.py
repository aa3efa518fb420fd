"""What a task tells the export stage about one method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.export import Dim
from transformers.cache_utils import Cache

Argument: TypeAlias = torch.Tensor | Cache | int | bool | tuple[torch.Tensor, ...] | None
DynamicAxes: TypeAlias = dict[int, Dim]
DynamicShape: TypeAlias = DynamicAxes | list[DynamicAxes | None] | tuple[DynamicAxes | None, ...] | None


@dataclass(frozen=True)
class MethodPlan:
    """How one method is traced: a ``forward`` of the model's own with these keyword arguments."""

    name: str  # of the method in the program
    kwargs: Mapping[str, Argument]
    dynamic_shapes: Mapping[str, DynamicShape]
    input_names: Mapping[str, str]  # placeholder -> name of the input in the program
    outputs: tuple[str, ...]  # fields of the model's output to keep, in this order
    cache: str | None = None  # the keyword argument that is the cache
    same_as: Mapping[str, str] = field(default_factory=dict)  # placeholder -> the one that is read in its place
    module: str = ""  # path of the submodule whose ``forward`` it is; "": the model
    output_names: Mapping[str, str] = field(default_factory=dict)  # field of the output -> its name in the program
