"""A session of a program that reads images beside text: one method embeds tokens, one images, one decodes embeddings.

n tokens of a call, D width of an embedding, N images, T features that one image becomes, H, W its size in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from runners.caller import PIXELS, require_fit
from runners.chat_encoding import encode_question
from runners.choices import Row
from runners.clock import Clock
from runners.errors import UserError
from runners.image import preprocess, read_image
from runners.manifest import ImagePrompt, TensorSpec
from runners.package import Package
from runners.program import Method as LoadedMethod
from runners.program import Program
from runners.session import Session
from runners.template import ChatTemplate, Message
from runners.threads import use_threads
from runners.tokenizer import TextCodec

VISION_ENCODER, TOKEN_EMBEDDING, TEXT_DECODER = "vision_encoder", "token_embedding", "text_decoder"
METHODS = (VISION_ENCODER, TOKEN_EMBEDDING, TEXT_DECODER)


class MultimodalSession(Session):
    """A session in whose prompts the token that stands for images takes the features of the images, in order.

    Without an image, that token is one as any other.
    """

    def __init__(self, package: Package, program: Program) -> None:
        self.package = package
        self._vision, self._embedding = (_loaded(program, name) for name in (VISION_ENCODER, TOKEN_EMBEDDING))
        self._features = torch.zeros(0, self._spec(TOKEN_EMBEDDING, outputs=True).shape[-1])  # [N * T, D]
        super().__init__(package, program)

    @classmethod
    def open(cls, package: Package, threads: int | None = None, clock: Clock | None = None) -> MultimodalSession:
        """Load a package's program.

        Args:
            package: an opened package.
            threads: size of the runtime's thread pool; None: physical cores.
            clock: adds up the time of the program's calls; None: nobody measures.

        Raises:
            UserError: the package reads no images beside text, the runtime lacks something, or the file does not load.
        """
        manifest = package.manifest
        if manifest.cache is None or manifest.image_prompt is None or not set(METHODS) <= set(manifest.methods):
            found = ", ".join(manifest.methods) or "no method"
            raise UserError(
                f"package '{manifest.name}' (task {manifest.model.task}) reads no images beside text: that takes the "
                f"methods {', '.join(METHODS)}; the package has {found}."
            )
        use_threads(threads)
        return cls(package, Program(package, clock))

    def encode(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Read images, in the place of earlier ones, and start a new sequence.

        Args:
            inputs: ``pixels`` float32 [N, 3, H, W].

        Raises:
            UserError: there are other inputs, or images of another size than the program takes.
        """
        if set(inputs) != {PIXELS}:
            raise UserError(f"method {VISION_ENCODER} takes {PIXELS}; given are {', '.join(inputs)}.")
        images = inputs[PIXELS].split(1)
        for image in images:
            require_fit(self._spec(VISION_ENCODER), image)
        self.reset()
        self._features = torch.cat([self._vision.call((image.contiguous(),))[0][0] for image in images])

    def reset(self) -> None:
        """Start a new sequence, without images."""
        super().reset()
        self._features = self._features[:0]

    def prefill(self, ids: Sequence[int]) -> Row:
        """As ``Session.prefill``.

        Raises:
            UserError: also where the prompt has other places for images than images were given.
        """
        token, count = self._image_prompt().token_id, len(self._features)
        places = [*self.tokens, *ids].count(token)
        if count and token in ids and places != count:
            raise UserError(
                f"the prompt has {places} tokens that stand for images, and the images given take {count}. Give each "
                "image its place in the prompt, and each place its image."
            )
        return super().prefill(ids)

    def _run(self, method: LoadedMethod, tokens: torch.Tensor) -> None:
        """Run a method on int64 [1, n] at the current position, and leave its outputs where they are."""
        # Cloned, as are features: a method's outputs lie where the next call of any method computes.
        embeddings = self._embedding.call((tokens,))[0]
        token = self._image_prompt().token_id
        places = (tokens[0] == token).nonzero().flatten().tolist() if len(self._features) else []
        seen = self._tokens.count(token) if places else 0
        for place in places:
            if seen < len(self._features):
                embeddings[0, place] = self._features[seen]
            seen += 1
        super()._run(method, embeddings)

    def _image_prompt(self) -> ImagePrompt:
        assert self.package.manifest.image_prompt is not None, "checked when the session was opened"
        return self.package.manifest.image_prompt

    def _spec(self, method: str, *, outputs: bool = False) -> TensorSpec:
        entry = self.package.manifest.methods[method]
        return (entry.outputs if outputs else entry.inputs)[0]


def open_text_session(package: Package, threads: int | None = None, clock: Clock | None = None) -> Session:
    """Load a package's program for decoding text, with or without images before it.

    Raises:
        UserError: see ``open`` of either class.
    """
    kind = MultimodalSession if TEXT_DECODER in package.manifest.methods else Session
    return kind.open(package, threads, clock)


def question_about(
    session: Session, path: Path, codec: TextCodec, template: ChatTemplate | None, messages: Sequence[Message]
) -> list[int]:
    """Give the session an image file; the ids of a conversation whose last message is about it.

    Raises:
        UserError: the package reads no images, the file is no readable one, or the prompt has no place for it.
    """
    manifest = session.package.manifest
    if not isinstance(session, MultimodalSession) or manifest.image is None or manifest.image_prompt is None:
        raise UserError(f"package '{manifest.name}' reads no images: leave --image out.")
    features = manifest.methods[VISION_ENCODER].outputs[0].shape[1]
    ids = encode_question(codec, template, messages, manifest.image_prompt, features)
    session.encode({PIXELS: preprocess(read_image(path), manifest.image)})
    return ids


def _loaded(program: Program, name: str) -> LoadedMethod:
    method = program.method(name)
    assert method is not None, "checked when the session was opened"
    return method
