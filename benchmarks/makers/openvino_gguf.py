"""``python -m benchmarks.makers.openvino_gguf SOURCE TARGET``: the model that OpenVINO GenAI makes of a GGUF file.

It writes the model beside the file, so that the file is linked into the target first.
"""

from __future__ import annotations

import sys
from pathlib import Path

import openvino_genai


def main(arguments: list[str]) -> None:
    """Write the folder."""
    source, target = map(Path, arguments)
    target.mkdir(parents=True, exist_ok=True)
    link = target / "model.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(source.resolve())
    openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    if not (target / "openvino_model.xml").is_file():
        raise SystemExit(f"error: OpenVINO GenAI wrote no openvino_model.xml into {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
