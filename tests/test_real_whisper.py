"""The real Whisper tiny.en: transcripts of real speech, not quantized and in 8 bits, against eager PyTorch. Minutes."""

from __future__ import annotations

import string
import wave
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from pipeline.artifacts import Loaded
from pipeline.config_reader import read
from pipeline.load import load
from pipeline.sources.cached import cache_directory
from runners.check_report import read_report
from runners.package import Package, open_package
from runners.speech import pieces
from runners.wav import read_wav
from tests.recordings import recordings
from tests.test_real import CONFIGS, pteline

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("whisper")]

EXACT = ("check.quantized.min_equal_prompts=1.0", "check.quantized.max_logit_difference=1.0e-3")


@pytest.fixture(scope="module")
def files() -> list[Path]:
    return recordings(cache_directory() / "tests")


@pytest.fixture(scope="module")
def eager(files: list[Path]) -> dict[Path, str]:
    """What ``generate`` of transformers makes of each recording."""
    loaded = load(read(CONFIGS / "whisper_tiny_en.yaml", []).model)
    return {file: transcript(loaded, file) for file in files}


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory, files: list[Path]) -> Package:
    return built("whisper_tiny_en", tmp_path_factory.mktemp("fp32"), files, *EXACT)


def transcript(loaded: Loaded, file: Path) -> str:
    assert loaded.extras.audio is not None
    assert loaded.tokenizer is not None
    (features,) = pieces(read_wav(file), loaded.extras.audio, 1, 1)
    with torch.inference_mode():
        tokens = loaded.model.generate(input_features=features)[0].tolist()
    return Tokenizer.from_str(loaded.tokenizer.tokenizer_json).decode(tokens, skip_special_tokens=True).strip()


def built(name: str, folder: Path, files: list[Path], *limits: str) -> Package:
    settings = (f"package.directory={folder}", f"check.audio=[{','.join(map(str, files))}]", "check.steps=64", *limits)
    pteline("build", str(CONFIGS / f"{name}.yaml"), "--verbose", *(x for s in settings for x in ("--set", s)))
    return open_package(folder / name)


def heard(package: Package, file: Path) -> str:
    return pteline("run", str(package.path), "--audio", str(file)).rstrip("\n")


def words(text: str) -> list[str]:
    return text.lower().translate(str.maketrans("", "", string.punctuation)).split()


def edits(left: list[str], right: list[str]) -> int:
    """Words to insert, delete or replace to make one of the other."""
    row = list(range(len(right) + 1))
    for i, word in enumerate(left, 1):
        above, row = row, [i]
        for j, other in enumerate(right, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (word != other)))
    return row[-1]


def test_word_edits_are_counted() -> None:
    assert edits(list("abc"), list("abc")) == 0
    assert edits(list("abc"), list("ac")) == 1
    assert edits(list("ab"), list("xby")) == 2


def test_fp32_hears_what_eager_hears(fp32: Package, files: list[Path], eager: dict[Path, str]) -> None:
    report = read_report(fp32.path / "report" / "check.json")
    assert report.passed
    assert len(report.prompts) == len(files)
    assert {file.name: heard(fp32, file) for file in files} == {file.name: text for file, text in eager.items()}


def test_a_long_recording_is_heard_piece_by_piece(
    tmp_path: Path, fp32: Package, files: list[Path], eager: dict[Path, str]
) -> None:
    """Two recordings in one file, the second behind the first one's 30 seconds."""
    joined = tmp_path / "joined.wav"
    with wave.open(str(joined), "wb") as out:
        for place, file in enumerate(files[:2]):
            with wave.open(str(file), "rb") as part:
                if place == 0:
                    out.setparams(part.getparams())
                rate, frames = part.getframerate(), part.readframes(part.getnframes())
            out.writeframes(frames + bytes(2 * 30 * rate - len(frames) if place == 0 else 0))
    assert heard(fp32, joined) == f"{eager[files[0]]} {eager[files[1]]}"


def test_8_bits_hear_it_within_a_word(tmp_path: Path, files: list[Path], eager: dict[Path, str]) -> None:
    package = built("whisper_tiny_en_8da8w", tmp_path, files)
    texts = {file: heard(package, file) for file in files}
    print(*(f"{file.name}: {text!r}, eager {eager[file]!r}" for file, text in texts.items()), sep="\n")
    assert max(edits(words(text), words(eager[file])) for file, text in texts.items()) <= 1
