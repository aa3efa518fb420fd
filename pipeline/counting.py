"""Notice a model that needs the number of its earlier tokens as a number, where a device's cache gives a tensor.

Most models add that number to something, and a tensor serves. Some cut a table of positions there, or count from it
with ``torch.arange``: no graph can do that with a tensor, and with a number it is read from the tensor first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

from pipeline.substitution import replaced


@dataclass
class Counting:
    """How a model counted while it ran."""

    needs_number: bool = False


@contextmanager
def watched_counting() -> Iterator[Counting]:
    """Within the scope a model runs eagerly with a device's cache, and is watched."""
    seen, arange = Counting(), torch.arange

    def counted(*args: object, **kwargs: object) -> object:
        """Takes tensors of shape [1], which the original refuses before any mode hears of them."""
        ends = {name: each for name, each in kwargs.items() if name != "out"}
        if any(isinstance(each, torch.Tensor) for each in (*args, *ends.values())):
            seen.needs_number = True
        return arange(*map(_as_number, args), **kwargs | {name: _as_number(each) for name, each in ends.items()})

    with replaced(torch, "arange", counted), _Watch(seen):
        yield seen


class _Watch(TorchFunctionMode):  # type: ignore[misc]  # torch is not type-checked here
    def __init__(self, seen: Counting) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.__getitem__ and _is_cut_by_tensors(args[1]):
            self._seen.needs_number = True
        return func(*args, **kwargs or {})


def _as_number(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) else value


def _is_cut_by_tensors(index: object) -> bool:
    slices = [each for each in (index if isinstance(index, tuple) else (index,)) if isinstance(each, slice)]
    return any(isinstance(end, torch.Tensor) for each in slices for end in (each.start, each.stop))
