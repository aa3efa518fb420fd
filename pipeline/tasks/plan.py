"""What a task tells the export stage about one method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.export import Dim
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from pipeline.passes.lift_cache import LeafUse

Argument: TypeAlias = torch.Tensor | Cache | ModelOutput | int | bool | tuple[torch.Tensor, ...] | None
DynamicAxes: TypeAlias = dict[int, Dim]
Forward: TypeAlias = Callable[..., Mapping[str, torch.Tensor]]
DynamicShape: TypeAlias = DynamicAxes | list[DynamicAxes | None] | tuple[DynamicAxes | None, ...] | None


@dataclass(frozen=True)
class MethodPlan:
    """How one method is traced: a ``forward`` of the model's own with these keyword arguments.

    Where a method has a part of the model for which it has no ``forward``, the plan names a function of the model
    (``self`` is its first argument) that calls the model's own modules.
    """

    name: str  # of the method in the program
    kwargs: Mapping[str, Argument]
    dynamic_shapes: Mapping[str, DynamicShape]
    input_names: Mapping[str, str]  # placeholder -> name of the input in the program
    outputs: tuple[str, ...]  # fields of the model's output to keep, in this order
    cache: str | None = None  # the keyword argument that is the cache
    same_as: Mapping[str, str] = field(default_factory=dict)  # placeholder -> the one that is read in its place
    module: str = ""  # path of the submodule whose ``forward`` it is; "": the model
    output_names: Mapping[str, str] = field(default_factory=dict)  # field of the output -> its name in the program
    dropped: tuple[str, ...] = ()  # placeholders that the forward asks for and this method does not need
    leaf_uses: Mapping[str, LeafUse] = field(default_factory=dict)  # beginning of a leaf's path -> what it does there
    last_logits: bool = False  # compute those of the last token alone, where the forward has no argument for it
    top_k: int | None = None  # give this many likeliest tokens in the place of the logits, the first of ``outputs``
    defers_guards: bool = False  # trace with conditions on sizes that torch cannot prove for every size
    forward: Forward | None = None  # a function of the model that is traced in the place of its ``forward``
    attention: str | None = None  # as ``attention_of`` takes it; None: the one that was chosen for the cache
    folds_constants: bool = False  # compute what depends on no input when the program is made
