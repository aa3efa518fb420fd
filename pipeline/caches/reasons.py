"""Classes of transformers that are not registered, and why: what ``pteline caches`` and the error messages say."""

from __future__ import annotations

_ABSTRACT = "an abstract base: a cache holds its subclasses."
_REGROUPS = (
    "the full-precision rest changes its number of dimensions when it is quantized, and whether that happens is a "
    "branch on its length. Use QuantizedCache with the fp8 backend."
)
_COMPRESSES = (
    "how many tokens wait for compression and how many entries there are decides shapes by Python numbers, and states "
    "come into being in later steps: one graph cannot hold two steps."
)
_PREFILL = (
    "the length of the prefill is a Python number that decides shapes and branches, and differs from prompt to prompt."
)

WHY_NOT: dict[str, str] = {
    "Cache": "the base class: give DynamicCache, StaticCache or a class of your own.",
    "CacheLayerMixin": _ABSTRACT,
    "LinearAttentionCacheLayerMixin": _ABSTRACT,
    "BaseQuantizedLayer": _ABSTRACT,
    "QuantizedLayer": _ABSTRACT,
    "QuantoQuantizedLayer": _REGROUPS,
    "HQQQuantizedLayer": _REGROUPS,
    "DFlashCache": (
        "the number of accepted draft tokens is a Python number that changes with each step and decides a length."
    ),
    "DeepseekV4HCACache": _COMPRESSES,
    "DeepseekV4CSACache": _COMPRESSES,
    "UnlimitedOcrDynamicReferenceSlidingWindowLayer": _PREFILL,
    "UnlimitedOcrStaticReferenceSlidingWindowLayer": _PREFILL,
}
