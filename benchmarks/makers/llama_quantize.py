"""``python -m benchmarks.makers.llama_quantize SOURCE TARGET Q4_0|Q8_0 THREADS``: llama.cpp's own quantization.

The source may be quantized already: it is unpacked first, as for every other peer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp as llama

_TYPES = {"Q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0, "Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0}


def main(arguments: list[str]) -> None:
    """Write the file."""
    source, target, kind, threads = arguments
    llama.llama_backend_init()
    params = llama.llama_model_quantize_default_params()
    params.ftype = _TYPES[kind]
    params.allow_requantize = True
    params.nthread = int(threads)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    code = llama.llama_model_quantize(source.encode(), target.encode(), params)
    if code != 0:
        raise SystemExit(f"error: llama_model_quantize returned {code} for {source}")


if __name__ == "__main__":
    main(sys.argv[1:])
