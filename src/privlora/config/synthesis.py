"""The group of public texts: who writes them, in which words they are asked for, and how many there are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from privlora.config.base import Group, Wrong, all_of
from privlora.errors import echoed, nearest

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

_GENERATORS: Final[dict[str, dict[str, str]]] = {
    "model": {},
    "file": {"file": "public.jsonl"},
    "endpoint": {"endpoint": "http://localhost:8000/v1", "endpoint_model": "its name there"},
    "callable": {"callable": "my_texts:write"},
}
"""Generator -> the settings that it needs, each with an example."""

_ASKED: Final = ("model", "endpoint", "callable")
_OF: Final[dict[str, tuple[str, ...]]] = {
    "file": ("file",),
    "endpoint": ("endpoint",),
    "endpoint_model": ("endpoint",),
    "callable": ("callable",),
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

    generator: Literal["model", "file", "endpoint", "callable"] = "model"
    """Who writes. model: the one that is trained, as it is at that step. file: a public one, each of whose texts is
    used once. endpoint: a server that speaks OpenAI's protocol. callable: a Python function or object of your own."""
    file: str | list[str] | None = None
    """PUBLIC records of generator=file, with the columns that data names, in any form that data.path may have. Never
    private ones."""
    endpoint: str | None = None
    """Address of generator=endpoint up to where /chat/completions follows, as http://localhost:8000/v1. It is sent the
    key in the environment variable PRIVLORA_API_KEY, if there is one."""
    endpoint_model: str | None = None
    """What the endpoint calls its model."""
    callable: str | None = None
    """Of generator=callable, as module:name. A function from a list of prompts to a list of answers, or an object with
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
    """What takes the place of texts that a step does not keep. variations: of those that are kept. fresh: new texts (L =
    infinity); pe-sgd then keeps none, since its model has moved, and aug-pe keeps those with votes. none: all texts
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
    def given(self) -> set[str]:
        """Settings that are other than their defaults."""
        return {
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default
        }

    @property
    def count(self) -> int:
        """N: of a population without copies."""
        return self.seeds * (1 + self.variations)

    @field_validator("generator", mode="before")
    @classmethod
    def _is_a_generator(cls, name: Any) -> Any:
        if not isinstance(name, str) or name in _GENERATORS:
            return name
        if "://" in name:  # not shown: it may hold a password
            raise Wrong("it is an address", "set generator to endpoint, and endpoint to the address")
        if _PLACE.fullmatch(name):
            raise Wrong("it is a function's place", "set generator to callable, and callable to it")
        if "." in name or "/" in name:
            raise Wrong("it is a file's name", "set generator to file, and file to that name", "file")
        if difflib.get_close_matches(name, _GENERATORS):
            raise Wrong(f"{echoed(name, _GENERATORS)} is no generator", nearest(name, _GENERATORS))
        known = (
            each + (f" (with {' and '.join(needs)})" if needs else "") for each, needs in _GENERATORS.items()
        )
        raise Wrong(f"{echoed(name)} is no generator", f"set it to {_one_of(list(known))}")

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
        needs = _GENERATORS[self.generator]
        lacking = [name for name in needs if getattr(self, name) is None]
        if lacking:
            what = f"generator={self.generator} needs {' and '.join(lacking)}"
            fix = "add " + ", and ".join(f"{name}: {needs[name]}" for name in lacking)
            yield Wrong(what, fix, *lacking, lacking=True)
        unread = {name: of for name, of in _OF.items() if self.generator not in of and name in self.given}
        if unread:
            readers = next(iter(unread.values()))
            names = [name for name, of in unread.items() if of == readers]
            only = f"{' and '.join(names)} is read for generator={_one_of(readers)} only"
            unless = "" if "generator" in self.model_fields_set else " unless it is set"
            fix = f"set generator to {_one_of(readers)}, or remove what is not read"
            yield Wrong(f"{only}, and generator is {self.generator}{unless}", fix, *names)
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


def _one_of(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
