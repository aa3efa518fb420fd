"""Cache classes as pytrees, and the device's own cache.

``with registered(): torch.export.export(model, (), {"input_ids": ids, "cache": cache})`` is all that a model with a
cache needs. A new cache class is a module here and a name in ``KNOWN``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from transformers.cache_utils import Cache, MtpCache

from pipeline.caches.cross import DEVICE_ENCODER_DECODER_CACHE, DeviceEncoderDecoderCache, encoder_decoder_cache
from pipeline.caches.device import DEVICE_CACHE, AttentionShape, DeviceCache, LayerShape, StateShape, device_cache
from pipeline.caches.dynamic import DYNAMIC_CACHE, empty_dynamic_cache
from pipeline.caches.encoder_decoder import ENCODER_DECODER_CACHE
from pipeline.caches.layer import LayerPytree, combined
from pipeline.caches.minimax import MINIMAX_CACHE
from pipeline.caches.pytree import CachePytree
from pipeline.caches.quantized import QUANTIZED_CACHE
from pipeline.caches.rewind import rewind
from pipeline.caches.scope import scoped, unknown_class
from pipeline.caches.static import STATIC_CACHE

__all__ = [
    "KNOWN",
    "AttentionShape",
    "CachePytree",
    "DeviceCache",
    "DeviceEncoderDecoderCache",
    "LayerPytree",
    "LayerShape",
    "StateShape",
    "combined",
    "device_cache",
    "empty_dynamic_cache",
    "encoder_decoder_cache",
    "entry_of",
    "registered",
    "rewind",
    "subclass_of",
]

_TRANSFORMERS = (DYNAMIC_CACHE, STATIC_CACHE, ENCODER_DECODER_CACHE, QUANTIZED_CACHE, MINIMAX_CACHE)
_DEVICE = (DEVICE_CACHE, DEVICE_ENCODER_DECODER_CACHE)


def registered(*caches: type[Cache] | CachePytree) -> AbstractContextManager[None]:
    """Make cache classes pytree nodes inside a ``with`` block; with no argument, every class in ``KNOWN``.

    Args:
        caches: classes in ``KNOWN``, or entries of your own.

    Raises:
        UserError: a class has no entry (a subclass of a known class has none either: the exact type is the key).
    """
    return scoped(tuple(c if isinstance(c, CachePytree) else entry_of(c) for c in caches) or KNOWN)


def entry_of(cls: type[Cache]) -> CachePytree:
    """Return the entry of exactly this class.

    Raises:
        UserError: there is none; the message shows the line to add.
    """
    for entry in KNOWN:
        if entry.cls is cls:
            return entry
    raise unknown_class(cls, KNOWN)


def subclass_of(parent: type[Cache], cls: type[Cache]) -> CachePytree:
    """Return an entry for a subclass that adds no state of its own: flattened as ``parent`` is, under its own name."""
    return _under_its_own_name(entry_of(parent), cls)


def _under_its_own_name(entry: CachePytree, cls: type[Cache]) -> CachePytree:
    def sample() -> Cache:
        cache = entry.sample()
        cache.__class__ = cls
        return cache

    return replace(entry, cls=cls, name=f"{cls.__module__}.{cls.__qualname__}", sample=sample)


MTP_CACHE = replace(_under_its_own_name(DYNAMIC_CACHE, MtpCache), name="pteline.MtpCache")

KNOWN: tuple[CachePytree, ...] = (*_TRANSFORMERS, *_DEVICE, MTP_CACHE)
