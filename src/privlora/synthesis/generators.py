"""Generators of public texts: by prompts that a writer answers, by an object of the user's, or from a public file.

They never see private data. What they are given is public (fixed words, texts that were generated before, and the model
as the releases so far have made it), so what they make of it is post-processing and costs no privacy. For the same
reason errors may say which call failed, and what the user's function or a server said of it; what was returned they do
not show.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from privlora.config.synthesis import PROMPTED, SynthesisSettings
from privlora.data.examples import Template
from privlora.errors import ConfigError, DataError, GeneratorError, PrivloraError, article
from privlora.randomness import counter_generator
from privlora.synthesis.endpoint import EndpointWriter
from privlora.synthesis.population import normalised
from privlora.synthesis.prompts import PRESETS, Prompts, beginning, own_prompts
from privlora.synthesis.writers import (
    PATIENCE,
    FunctionWriter,
    ModelWriter,
    Writer,
    find_callable,
    name_of,
    within,
)

_TRIES: Final = 8
"""How often a text is asked for until it is not empty."""


@runtime_checkable
class Generator(Protocol):
    """Writes public texts; it is given public ones alone."""

    def random(self, count: int) -> list[str]:
        """``count`` fresh texts of the kind that the prompts describe."""

    def vary(self, texts: Sequence[str]) -> list[str]:
        """One variation of each, in order."""


class ResumableGenerator(Generator, Protocol):
    """One that goes on where it stopped."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class _Resumable:
    """Counts what was given, so that a run that is resumed goes on where it stopped.

    told: set by who wants to know how far a call is: (texts written, all texts of the call), both public.
    """

    _given = 0
    told: Callable[[int, int], None] | None = None

    def state_dict(self) -> dict[str, Tensor]:
        return {"given": torch.tensor(self._given)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._given = int(state["given"])


class _Asking(_Resumable, ABC):
    """What is common to generators that are asked: a call is numbered, checked, and repeated for texts that are empty.

    A call that fails is not counted and changes nothing, so that asking again is the same call.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def random(self, count: int) -> list[str]:
        return self._call("random", [None] * count)

    def vary(self, texts: Sequence[str]) -> list[str]:
        return self._call("vary", list(texts))

    @abstractmethod
    def _draw(
        self, seeds: list[str | None], call: int, attempt: int, told: Callable[[int], None]
    ) -> list[str]:
        """A text for each of ``seeds``: None for a fresh one, else a variation of it; checked by ``_checked_texts``.

        told: may be called with how many of them are written.
        """

    def _call(self, kind: str, seeds: Sequence[str | None]) -> list[str]:
        call = self._given + 1
        texts = [""] * len(seeds)
        missing = list(range(len(seeds)))
        try:
            self._tell(len(texts), 0, 0)
            tries = _TRIES if kind == "random" else 2 * _TRIES
            for attempt in range(tries):
                if not missing:
                    break
                # A text that nothing follows on has no variation: a fresh one stands for it.
                asked = [seeds[i] if attempt < _TRIES else None for i in missing]
                told = partial(self._tell, len(texts), len(texts) - len(missing))
                found = self._draw(asked, call, attempt, told)
                for i, text in zip(missing, found, strict=True):
                    texts[i] = text.strip()
                missing = [i for i in missing if not texts[i]]
                self._tell(len(texts), len(texts) - len(missing), 0)
            if missing:
                raise GeneratorError(
                    f"{len(missing)} of {len(texts)} texts are empty, {tries} times in a row",
                    fix="mend the prompts or the generator, or raise the temperature",
                )
        except PrivloraError as error:
            raise error.of(f"{self._name}, call {call} ({kind}, {len(texts)} texts)") from error
        self._given = call
        return texts

    def _tell(self, total: int, before: int, more: int) -> None:
        if self.told is not None:
            self.told(before + more, total)


class _Request(str):
    """What a writer is asked as it stands, in the place of a text that is varied."""


class PromptedGenerator(_Asking):
    """Asks a writer, in the words of ``prompts``.

    A chat is asked for a fresh text, or for a variation of one in a tone that is drawn uniformly. A writer without chat
    goes on: with ``prompts.lead_in`` for a fresh text, with the first half of a text for its variation,
    which begins with them. Everything that is drawn follows from the public ``seed``, the number of the call and the
    place in it, and torch's generators are left alone.
    """

    def __init__(self, writer: Writer, prompts: Prompts, *, seed: int) -> None:
        super().__init__(writer.name)
        self._writer, self._prompts, self._seed = writer, prompts, seed

    @property
    def chat(self) -> bool:
        """Whether it asks; else it gives beginnings to go on with."""
        return self._writer.chat

    def requests(self, count: int) -> list[str]:
        """``count`` public requests for fresh texts, as ``Prompts.fresh`` words them for this writer."""
        return self._prompts.fresh(count, chat=self._writer.chat)

    def samples(self, requests: Sequence[str], count: int) -> list[list[str]]:
        """``count`` texts of each request, which is asked as it stands; none is empty."""
        texts = self._call("random", [_Request(each) for each in requests for _ in range(count)])
        return [texts[first : first + count] for first in range(0, len(texts), count)]

    def _draw(
        self, seeds: list[str | None], call: int, attempt: int, told: Callable[[int], None]
    ) -> list[str]:
        asked, kept = [], [""] * len(seeds)
        tones = counter_generator(_key(self._seed, call, attempt, "tones"))
        for i, seed in enumerate(seeds):
            if isinstance(seed, _Request):
                asked.append(str(seed))
            elif not self._writer.chat:
                kept[i] = beginning(seed or "")
                asked.append(self._prompts.lead_in + kept[i])
            elif seed is None:
                asked.append(self._prompts.random)
            else:
                tone = self._prompts.tones[tones.integers(len(self._prompts.tones))]
                asked.append(self._prompts.variation_of(seed, tone))
        self._writer.told = told
        written = _checked_texts(
            self._writer.write(asked, _key(self._seed, call, attempt, "texts")), len(seeds)
        )
        answers = (text.removeprefix(prompt) for text, prompt in zip(written, asked, strict=True))
        return [head + answer if answer.strip() else "" for head, answer in zip(kept, answers, strict=True)]


class OwnGenerator(_Asking):
    """An object of the user's that has ``random`` and ``vary``; what it returns is checked, and its time is limited.

    What it draws by, and what it remembers when a run is resumed, is its own matter.
    """

    def __init__(self, own: Generator) -> None:
        super().__init__(f"generator {name_of(own)}")
        self._own = own

    def _draw(
        self, seeds: list[str | None], call: int, attempt: int, told: Callable[[int], None]
    ) -> list[str]:
        texts = [seed for seed in seeds if seed is not None]
        asked = (lambda: self._own.vary(texts)) if texts else (lambda: self._own.random(len(seeds)))
        return _checked_texts(within(PATIENCE, asked), len(seeds))


class FileGenerator(_Resumable):
    """Texts of a PUBLIC file, each once, in an order that the public ``seed`` shuffles.

    ``random`` draws without replacement. ``vary`` varies nothing: it gives the next texts that were not used, so that
    one population after another is of fresh texts. Empty texts and copies are left out.
    """

    def __init__(self, texts: Sequence[str], *, seed: int) -> None:
        """texts: in the file's order; those that say the same but for blanks and capitals count as one."""
        unlike = {normalised(text): text.strip() for text in reversed(texts) if text.strip()}
        pool = list(unlike.values())[::-1]
        self._texts = [pool[i] for i in counter_generator(_key(seed, "file")).permutation(len(pool))]

    @property
    def left(self) -> int:
        """Texts that were not used."""
        return len(self._texts) - self._given

    def random(self, count: int) -> list[str]:
        self.refuse_fewer(count)
        self._given += count
        return self._texts[self._given - count : self._given]

    def vary(self, texts: Sequence[str]) -> list[str]:
        return self.random(len(texts))

    def refuse_fewer(self, count: int) -> None:
        """Raise DataError where fewer than ``count`` texts are left."""
        left = self.left
        if count > left:
            raise DataError(
                f"synthesis.file has {left} different texts that are not used yet, and {count} are needed: seeds x "
                "(1 + variations) at first, and seeds x variations whenever texts evolve",
                fix="give a larger public file, lower synthesis.seeds or variations, or set evolution: none; a run "
                "that has begun goes on once more texts stand at the end of its file",
            )


def _checked_texts(answer: object, count: int) -> list[str]:
    """``answer`` where it is a list or tuple of ``count`` strings of valid Unicode. Raises GeneratorError otherwise.

    Of what is wrong the place and the type are told, not the content.
    """
    fix = f"return a list with {count} strings, one for each prompt or text in its order"
    if answer is None:
        raise GeneratorError("it returned nothing", fix=fix)
    if not isinstance(answer, list | tuple):
        raise GeneratorError(f"it returned {article(type(answer).__name__)}, not a list of texts", fix=fix)
    if len(answer) != count:
        raise GeneratorError(f"it returned {len(answer)} texts instead of {count}", fix=fix)
    for number, text in enumerate(answer, start=1):
        if not isinstance(text, str):
            raise GeneratorError(
                f"text {number} of what it returned is of type {type(text).__name__}", fix=fix
            )
        try:
            text.encode()
        except UnicodeEncodeError:  # not chained: it shows the text
            raise GeneratorError(
                f"text {number} of what it returned cannot be written as UTF-8",
                fix="decode bytes with errors='replace'; half of a surrogate pair is no character",
            ) from None
    return list(answer)


def build_generator(
    settings: SynthesisSettings,
    *,
    seed: int,
    model: Any = None,
    tokenizer: Any = None,
    own: Any = None,
    max_tokens: int = 8192,
    texts: Sequence[str] = (),
    template: Template | None = None,
) -> PromptedGenerator | OwnGenerator | FileGenerator:
    """The generator that the settings describe.

    Args:
        settings: the group ``synthesis``.
        seed: PUBLIC; the same one gives the same texts.
        model, tokenizer: where the model writes, as they are when texts are asked for.
        own: instead of what settings.callable names: a function from a list of prompts to
            a list of answers, or an object with ``random`` and ``vary``.
        max_tokens: where the model writes, bound on a batch, prompts and answers.
        texts: of a file.
        template: of records with prompts, which texts answer; by its chat template the model is asked.

    Raises:
        ConfigError, DataError: what is named cannot be imported, read or used.
    """
    if settings.generator == "file":
        return FileGenerator(texts, seed=seed)
    drawing: dict[str, Any] = {
        "temperature": settings.temperature,
        "max_new_tokens": settings.max_new_tokens,
    }
    writer: Writer
    if settings.generator == "model":
        writer = ModelWriter(
            model, tokenizer, chat=settings.chat, max_tokens=max_tokens, template=template, **drawing
        )
    elif settings.generator == "endpoint":
        assert settings.endpoint is not None
        assert settings.endpoint_model is not None
        writer = EndpointWriter(
            settings.endpoint,
            settings.endpoint_model,
            chat=settings.chat is not False,
            **drawing,
        )
    else:
        if own is None:
            assert settings.callable is not None
            own = find_callable(settings.callable)
        if isinstance(own, Generator) and not isinstance(own, type):
            read = {"random_prompt"} if template is not None else set()  # its texts are answers to that
            unused = sorted(settings.given.intersection(PROMPTED) - read)
            if unused:
                raise ConfigError(
                    f"synthesis.{unused[0]} is not read: an object with random and vary has words of its own",
                    fix="remove it, or give a function that answers prompts",
                )
            return OwnGenerator(own)
        if isinstance(own, type) or not callable(own):
            raise ConfigError(
                f"the generator is {article(type(own).__name__)}",
                fix="give a function from a list of prompts to a list of texts, or an object with random and vary",
            )
        writer = FunctionWriter(own, chat=settings.chat is not False)
    return PromptedGenerator(writer, prompts_of(settings), seed=seed)


def prompts_of(settings: SynthesisSettings) -> Prompts:
    """The user's own prompts, or the preset with what the user has replaced of it."""
    if settings.random_prompt is not None:
        return own_prompts(settings.random_prompt, settings.variation_prompt)
    return PRESETS[settings.preset or "text"]


def _key(*parts: int | str) -> int:
    """A key of 128 bits for each use of the public seed."""
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:16], "little")
