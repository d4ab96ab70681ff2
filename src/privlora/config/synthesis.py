"""The group of public texts: who writes them, in which words they are asked for, and how many there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from privlora.config.base import Group, Wrong, all_of

Preset = Literal[
    "text",
    "medical-abstract",
    "life-science-preprint",
    "parliamentary-speech",
    "clinical-note",
    "support-chat",
    "product-review",
]
"""Of the table of prompts, which is above this room."""

_PLACE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

PROMPTED: Final = ("preset", "random_prompt", "variation_prompt", "chat")
"""Settings of generators that are asked in words."""

_ASKED: Final = ("model", "endpoint", "callable")
_OF: Final[dict[str, tuple[str, ...]]] = {
    "endpoint_model": ("endpoint",),
    "temperature": ("model", "endpoint"),
    "max_new_tokens": ("model", "endpoint"),
    **dict.fromkeys(PROMPTED, _ASKED),
}
"""Setting -> the generators that read it; of others it would be ignored."""

OF_POPRI: Final = ("requests", "answers", "dpo_learning_rate")
"""Settings that the method popri reads; with others they would be ignored."""


class SynthesisSettings(Group):
    """PUBLIC texts, kept as a population: who writes them, in which words, and how it evolves.

    None of it sees private records: the generator is given fixed words, texts that were generated before, and the model
    as the releases so far have made it.
    """

    file: str | list[str] | None = None
    """PUBLIC records instead of texts that the model in training writes, with the columns that data names, in any form
    that data.path may have; each is used once. Never private ones."""
    endpoint: str | None = None
    """Address of a server that speaks OpenAI's protocol and writes instead, up to where /chat/completions follows, as
    http://localhost:8000/v1. It is sent the key in the environment variable PRIVLORA_API_KEY, if there is one."""
    endpoint_model: str | None = None
    """What the endpoint calls its model."""
    callable: str | None = None
    """What writes instead, as module:name: a function from a list of prompts to a list of answers, or an object with
    random and vary."""
    preset: Preset | None = None
    """Kind of text that prompts ask for; null: text, which is any."""
    random_prompt: str | None = None
    """Instead of a preset: the request for a fresh text; without chat, the words before one. Where records have prompts
    or messages, it is the PUBLIC prompt that every text answers."""
    variation_prompt: str | None = None
    """With random_prompt: the request for a variation. {text} is the text, {tone} one of nine tones; null takes a
    general one."""
    chat: bool | None = None
    """Whether texts are asked for, or beginnings gone on with. Null: true, but of a model whether its tokenizer has a
    chat template."""
    seeds: int = Field(default=100, ge=1)
    """K: texts that are kept at each choice."""
    variations: int = Field(default=1, ge=0)
    """L - 1: variations of each, so that there are seeds x (1 + variations) texts."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling; 1 draws as the model says."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Longest text in tokens; of the model at most what its context has room for."""
    warm_start_epochs: int = Field(default=0, ge=0)
    """Ordinary epochs on the first texts before the first private step, which cost no epsilon."""
    warm_start_learning_rate: float | None = Field(default=None, gt=0)
    """Of these epochs; null: method.learning_rate, or the method's own."""
    similarity_limit: float | None = Field(default=0.99, gt=0, le=1)
    """Of two texts whose gradients have a larger cosine, one is left out; null leaves out exact copies alone."""
    evolution: Literal["variations", "fresh", "none"] = "variations"
    """What takes the place of texts that a step does not keep. variations: of those that are kept. fresh: new texts (L
    = infinity); pe-sgd then keeps none, since its model has moved, and aug-pe keeps those with votes. none: all texts
    stay."""
    embedding: str | None = None
    """Methods that release votes: a PUBLIC sentence-transformers model, in which texts are near each other. Null: the
    base model's own hidden states."""
    requests: int = Field(default=40, ge=1)
    """popri: R, the requests that the model answers in every round."""
    answers: int = Field(default=5, ge=2)
    """popri: J, the texts that it writes for each of them. Records score R x J texts; the fewer, the less noise."""
    dpo_learning_rate: float = Field(default=8e-7, gt=0)
    """popri: of AdamW in a round, which falls to 0. The default is for 8 billion parameters; small models need more."""
    epochs: int = Field(default=4, ge=0)
    """Methods that release votes: ordinary epochs on the last texts, which cost no epsilon. 0 with popri: the adapter
    is the one that preferences tuned."""
    samples: int | None = Field(default=None, ge=1)
    """privlora synthesize: how many texts are released; null for as many as a population has."""
    publish: bool = False
    """Release the texts as a data set instead of an adapter; privlora synthesize sets it."""
    source: str | None = None
    """privlora synthesize --from: a finished run, whose adapter is asked for the texts at no further cost."""

    @property
    def generator(self) -> Literal["model", "file", "endpoint", "callable"]:
        """Who writes: the model that is trained, as it is at that step, unless another writer is named."""
        if self.file is not None:
            return "file"
        if self.endpoint is not None:
            return "endpoint"
        return "model" if self.callable is None else "callable"

    @property
    def given(self) -> set[str]:
        """Settings that are other than their defaults."""
        return {
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default
        }

    @property
    def count(self) -> int:
        """N: of a population without copies."""
        return self.seeds * (1 + self.variations)

    @field_validator("endpoint")
    @classmethod
    def _is_an_address(cls, endpoint: str | None) -> str | None:
        # What is wrong is not shown: it may hold a password.
        if endpoint is None:
            return None
        try:
            parts = urlsplit(endpoint)
            plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            plain = False
        if not plain or endpoint != endpoint.strip():
            raise Wrong("it is no address", "write it as http://localhost:8000/v1")
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            fix = "remove user, password and what follows ? or #; export a key as PRIVLORA_API_KEY"
            raise Wrong("it holds more than an address, and settings are written to disk", fix)
        return endpoint

    @field_validator("callable")
    @classmethod
    def _is_a_place(cls, place: str | None) -> str | None:
        if place is not None and not _PLACE.fullmatch(place):
            raise Wrong("it is not module:name", "write it as my_texts:write")
        return place

    @field_validator("random_prompt", "variation_prompt")
    @classmethod
    def _says_something(cls, words: str | None) -> str | None:
        if words is not None and not words.strip():
            raise Wrong("it is empty", "write the words, or remove the setting")
        return words

    @model_validator(mode="after")
    def _fits_together(self) -> SynthesisSettings:
        all_of(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[Wrong]:
        writers = [name for name in ("file", "endpoint", "callable") if getattr(self, name) is not None]
        if len(writers) > 1:
            yield Wrong(f"{' and '.join(writers)} are several writers", "give one of them", *writers)
        if self.endpoint is not None and self.endpoint_model is None:
            fix = "add endpoint_model: its name there"
            yield Wrong("endpoint needs endpoint_model", fix, "endpoint_model", lacking=True)
        unread = [name for name, of in _OF.items() if self.generator not in of and name in self.given]
        if unread:
            writer = "the model writes" if self.generator == "model" else f"{self.generator} is given"
            yield Wrong(f"{' and '.join(unread)} is not read where {writer}", "remove either", *unread)
        if self.warm_start_learning_rate is not None and not self.warm_start_epochs:
            what = "warm_start_learning_rate goes with warm_start_epochs"
            yield Wrong(what, "set how many epochs, or remove the rate", "warm_start_learning_rate")
        if self.source is not None and not self.publish:
            yield Wrong("source is read by privlora synthesize", "give its folder with --from", "source")
        if self.preset is not None and self.random_prompt is not None:
            yield Wrong("preset and random_prompt are two kinds of text", "remove one of them", "preset")
        if self.random_prompt is None and self.variation_prompt is not None:
            fix = "add random_prompt, or remove variation_prompt"
            yield Wrong("variation_prompt goes with random_prompt", fix, "variation_prompt")
        if self.variation_prompt is not None and "{text}" not in self.variation_prompt:
            what = "variation_prompt has no place for the text that is varied"
            yield Wrong(what, "write {text} where it belongs", "variation_prompt")
