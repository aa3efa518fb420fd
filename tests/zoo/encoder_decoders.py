"""Models with an encoder beside their decoder, and their proof: the program answers an input as eager PyTorch does.

V vocabulary. Both of a family's sides have up to 48 positions, so that the longest input and answer are short.
"""

from __future__ import annotations

import torch
import transformers as tf
from transformers import PreTrainedModel

from pipeline.artifacts import Extras
from pipeline.config import ExportSettings
from pipeline.register import cache_argument
from runners.encoder_decoder import Seq2SeqSession
from runners.manifest import Decoding, TensorSpec
from runners.package import Package
from runners.preprocessing import AudioPreprocessing, LogMel, Waveform
from runners.program import Program
from runners.threads import use_threads
from tests.zoo.greedy import STEPS, decoded, random_ids, replayed
from tests.zoo.row import Family

BEGINNINGS = (17, 5, 1)  # tokens that an answer begins with; the first is fed in more calls than one
CALL = 8
RATE = 16_000
SAYS = f"""On one loaded program that reads the longest input, one of about half that length and the shortest
(Whisper's all have one length), whose answers begin with 17, 5 and 1 tokens, at most {CALL} a call,

- {STEPS} greedy tokens are those of eager PyTorch with transformers' own cache, and every logit is within the bound;
- the first answer goes on to the last position of the decoder's cache;
- each input gives, bit for bit, what a freshly loaded program gives, whatever the one before it left in the caches.
"""

TOKENS = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
SIZES = dict(
    **TOKENS,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=64,
    init_std=0.3,
)
POSITIONS = dict(max_position_embeddings=48)


def t5() -> tf.PreTrainedConfig:
    """Positions far apart share a bucket."""
    buckets = dict(relative_attention_num_buckets=8, relative_attention_max_distance=12)
    sizes = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, initializer_factor=1.5)
    return tf.T5Config(**{**TOKENS, "decoder_start_token_id": 0}, **sizes, **buckets)


def whisper() -> tf.PreTrainedConfig:
    """A second of sound: 100 frames, of which the encoder makes 50 positions."""
    return tf.WhisperConfig(**SIZES, num_mel_bins=8, max_source_positions=50, max_target_positions=48)


def moonshine() -> tf.PreTrainedConfig:
    layers = dict(encoder_num_hidden_layers=2, decoder_num_hidden_layers=2)
    heads = dict(encoder_num_attention_heads=2, decoder_num_attention_heads=4)
    sizes = dict(hidden_size=32, intermediate_size=48, initializer_range=0.3)
    return tf.MoonshineConfig(**TOKENS, **POSITIONS, **layers, **heads, **sizes)


def extras(audio: AudioPreprocessing | None = None) -> Extras:
    """Nothing is suppressed, and an answer begins with what the proof gives."""
    return Extras(decoding=Decoding(prompt=[1], suppressed=[], suppressed_first=[]), audio=audio)


def log_mel() -> Extras:
    return extras(LogMel(sampling_rate=RATE, feature_size=8, n_fft=400, hop_length=160, n_samples=RATE))


def waveform() -> Extras:
    return extras(Waveform(sampling_rate=RATE, normalize=False))


TEXT = dict(task="text2text", extras=extras, placements=("buffer",), export=ExportSettings(max_prefill_length=CALL))
SPEECH = {**TEXT, "task": "speech-to-text"}
FAMILIES = (
    Family("t5", t5, **TEXT, encoder_length=40, ci=("buffer",)),
    Family("bart", lambda: tf.BartConfig(**SIZES, **POSITIONS), **TEXT),
    Family("mvp", lambda: tf.MvpConfig(**SIZES, **POSITIONS), **TEXT),
    Family("marian", lambda: tf.MarianConfig(**SIZES, **POSITIONS), **TEXT),
    Family("whisper", whisper, **{**SPEECH, "extras": log_mel}, ci=("buffer",)),
    Family("moonshine", moonshine, **{**SPEECH, "extras": waveform}, encoder_length=2 * RATE),
)


def prove(model: PreTrainedModel, package: Package) -> None:
    """Answer inputs of several lengths greedily, on one loaded program, and compare each step with eager.

    Raises:
        AssertionError: says which beginning and step differ, and how.
    """
    use_threads(1)
    session = Seq2SeqSession(package, Program(package))
    (spec,) = package.manifest.methods["encode"].inputs
    lengths = (spec.shape[-1], (spec.shape[-1] + spec.min_shape[-1]) // 2, spec.min_shape[-1])
    for begin, length in zip(BEGINNINGS, lengths, strict=True):
        given, ids = (
            random_input(spec, length, session.vocabulary_size, begin),
            random_ids(begin, session.vocabulary_size),
        )
        session.encode({spec.name: given})
        steps = session.max_length - begin if begin == BEGINNINGS[0] else STEPS
        said = decoded(session, Eager(model, given), ids, steps)
        assert begin != BEGINNINGS[0] or session.position == session.max_length
        fresh = Seq2SeqSession(package, Program(package))
        fresh.encode({spec.name: given})
        assert torch.equal(replayed(fresh, ids, said), said), f"after {begin} tokens, a fresh load says something else"


def random_input(spec: TensorSpec, length: int, vocabulary: int, seed: int) -> torch.Tensor:
    """An input of the encoder whose last axis has this length."""
    if spec.dtype == "int64":
        return torch.tensor([random_ids(length, vocabulary)])
    return 0.5 * torch.randn(*spec.shape[:-1], length, generator=torch.Generator().manual_seed(seed))


class Eager:
    """The model by transformers alone: its encoder's output for one input, and the cache that transformers makes."""

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, given: torch.Tensor) -> None:
        self._model, self._name = model, cache_argument(model)
        self._encoded = model.get_encoder()(**{model.main_input_name: given})
        self._cache: tf.EncoderDecoderCache | None = None

    @torch.inference_mode()
    def feed(self, ids: list[int]) -> torch.Tensor:
        """Logits ``[V]`` after the last of further tokens."""
        given = {"encoder_outputs": self._encoded, self._name: self._cache}
        output = self._model(decoder_input_ids=torch.tensor([ids]), use_cache=True, **given)
        self._cache = output[self._name]
        return output.logits[0, -1]
