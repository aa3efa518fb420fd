"""Let torch's cache of fake results take the operators that torchao quantizes with.

A fake tensor has a shape and no data. torch keeps the shapes that an operator gave, by those of its arguments, but only
for operators of its own; torchao's are composed of some twenty others each, all computed anew at each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch._subclasses import FakeTensorMode

from pipeline.substitution import replaced

_NAMESPACES = ("torchao",)
_validate = FakeTensorMode._validate_cache_key


@contextmanager
def cached_shapes() -> Iterator[None]:
    """Within the scope the shapes that torchao's functional operators give are computed once for equal arguments."""
    with replaced(FakeTensorMode, "_validate_cache_key", _validate_cache_key):
        yield


def _validate_cache_key(
    self: FakeTensorMode, func: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    if not is_cacheable(func):
        _validate(self, func, args, kwargs)


def is_cacheable(operator: object) -> bool:
    """Whether an operator is one of torchao's that writes nothing, returns new tensors and asks for no data."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace not in _NAMESPACES:
        return False
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
    is_new = all(value.alias_info is None for value in operator._schema.returns)
    return is_new and not operator._schema.is_mutable and not tags & set(operator.tags)
