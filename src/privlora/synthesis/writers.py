"""Who answers prompts: the model that is trained, and a user's own Python function.

A writer sees prompts alone, and prompts are public: they are made of fixed words and of texts that were generated.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, Final, Protocol

import torch

from privlora.data.examples import Template, encode_asked, encode_prompts
from privlora.data.rendering import is_chat
from privlora.errors import ConfigError, DataError, GeneratorError, article, in_one_line, named
from privlora.evaluation.generation import Sampling, decoded, generate_tokens, start_of_text

PATIENCE: Final = 300.0
"""Seconds that one request to an endpoint, or one call of a user's own code, may take."""


class Writer(Protocol):
    """Answers prompts."""

    name: str
    """For errors."""
    chat: bool
    """Whether prompts are requests; else each is the beginning of what is to be gone on with."""
    told: Callable[[int], None] | None
    """Set by who asks; a writer that answers one after another says how many of a call's prompts it has answered."""

    def write(self, prompts: Sequence[str], key: int) -> Any:
        """An answer to each prompt in its order, without the prompt. key: PUBLIC; what is drawn is drawn by it.

        What comes back is looked at by the caller, who also says which call it was. Raises GeneratorError.
        """


class ModelWriter:
    """The model itself, with whatever adapter is attached when it is called: in training, the model so far.

    Where the model is asked with a chat template, the prompt is one user turn. Prompts that leave no room in the
    model's context lose tokens from their left.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        chat: bool | None = None,
        temperature: float = 1.0,
        max_new_tokens: int = 512,
        max_tokens: int = 8192,
        template: Template | None = None,
    ) -> None:
        """chat: None for whether there is a chat template. max_tokens: bound on a batch, prompts and answers. template:
        of records with prompts, by whose chat template prompts are rendered; None for the tokenizer's.

        Raises ConfigError for numbers out of range, or for a chat without a template.
        """
        self.name = "model"
        self.told: Callable[[int], None] | None = None
        own = None if template is None else template.chat_template
        there = bool(own or tokenizer.chat_template)
        usual = there if template is None else is_chat(template, tokenizer)
        self.chat = usual if chat is None else chat
        self._turns = _TURNS
        if template is not None:
            told = {**_TURNS.chat_template_kwargs, **template.chat_template_kwargs}
            self._turns = replace(_TURNS, chat_template=own, chat_template_kwargs=told)
        if self.chat and not there:
            raise ConfigError(
                "the tokenizer has no chat template, so the model cannot be asked for texts",
                fix="set synthesis.chat to false, so that it goes on with beginnings; or take an instruction-tuned one",
            )
        if max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens={max_new_tokens} is below 1", fix="give 512, or as many as a text has"
            )
        self._sampling = Sampling(0, temperature)
        self._model, self._tokenizer = model, tokenizer
        self._max_new_tokens, self._max_tokens = max_new_tokens, max_tokens

    def write(self, prompts: Sequence[str], key: int) -> list[str]:
        context = getattr(self._model.config, "max_position_embeddings", None)
        longest = max(context - self._max_new_tokens, context // 2) if context else 2**31
        asked = asked_tokens(prompts, self._tokenizer, chat=self.chat, longest=longest, template=self._turns)
        if not all(map(len, asked)):
            start = start_of_text(
                self._tokenizer, fix="set synthesis.random_prompt to the words before a text"
            )
            asked = [ids if len(ids) else start for ids in asked]
        new = min(self._max_new_tokens, (context or 2**31) - max(map(len, asked)))
        answers = generate_tokens(
            self._model,
            self._tokenizer,
            asked,
            max_new_tokens=new,
            max_tokens=self._max_tokens,
            sampling=Sampling(key, self._sampling.temperature),
            told=self.told,
        )
        return [self._read(ids.tolist(), row) for ids, row in zip(asked, answers, strict=True)]

    def _read(self, asked: list[int], row: list[int]) -> str:
        if self.chat:
            return decoded(self._tokenizer, row)
        # Some tokenizers decode a first word without the blank before it, which is needed where a word follows others.
        before, whole = decoded(self._tokenizer, asked), decoded(self._tokenizer, [*asked, *row])
        return whole.removeprefix(before) if whole.startswith(before) else decoded(self._tokenizer, row)


_TURNS: Final = Template(messages="turns", chat_template_kwargs={"enable_thinking": False})
"""Of prompts as turns. Templates without thoughts have no such variable, and take no notice of it."""


def asked_tokens(
    prompts: Sequence[str], tokenizer: Any, *, chat: bool, longest: int, template: Template = _TURNS
) -> list[Any]:
    """(T,) token ids of each prompt: as a user's turn, or as a beginning. Raises ConfigError."""
    if not chat:
        return encode_prompts(prompts, tokenizer, max_length=longest)
    turns = [{"turns": [{"role": "user", "content": prompt}]} for prompt in prompts]
    try:
        return encode_asked(turns, template, tokenizer, max_length=longest)
    except DataError:
        raise ConfigError(
            "the tokenizer's chat template refuses a conversation of one user turn",
            fix="set synthesis.chat to false, or mend the template",
        ) from None


class FunctionWriter:
    """A user's function from a list of prompts to a list of answers, one each.

    It runs in a thread of its own and has `PATIENCE` seconds; Python cannot stop it after that, but the run stops.
    """

    def __init__(self, function: Callable[[list[str]], Any], *, chat: bool = True) -> None:
        self.name, self.chat = f"function {name_of(function)}", chat
        self.told: Callable[[int], None] | None = None  # all are answered at once
        self._function = function

    def write(self, prompts: Sequence[str], key: int) -> Any:
        return within(PATIENCE, lambda: self._function(list(prompts)))


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What ``call`` returns. Raises GeneratorError where it raises anything, or is not done after ``seconds``."""
    done: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            done.append((call(), None))
        except BaseException as error:  # noqa: BLE001 - also what a thread would swallow, as SystemExit
            done.append((None, error))

    thread = Thread(target=run, daemon=True)  # a hanging one does not keep the process alive
    thread.start()
    thread.join(seconds)
    if not done:
        raise GeneratorError(f"it did not answer within {seconds:g} s", fix="mend it, or ask for fewer texts")
    result, error = done[0]
    if error is not None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise GeneratorError(
            f"it raised {_told(error)}, at {Path(last.filename).name}, line {last.lineno}",
            fix="mend the function; a run that has begun goes on with `privlora resume`",
        ) from error
    return result


def _told(error: BaseException) -> str:
    """Kind and message of what the user's own code raised. It was given public texts alone, so what it says is public;
    but where memory ran out, libraries say how much the process holds, which private batches had a part in."""
    kind = type(error).__name__
    try:
        said = in_one_line(str(error))
    except Exception:  # noqa: BLE001 - the user's own class may fail to say what it is
        said = ""
    return kind if not said or _of_memory(error) else f"{kind}: {said}"


def _of_memory(error: BaseException) -> bool:
    """Whether it, or what it was raised for, is that memory ran out, by class or in the words of a library."""
    causes: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in causes:
        causes.append(following)
        following = following.__cause__ or following.__context__
    return any(
        isinstance(cause, MemoryError | torch.OutOfMemoryError)
        or any("out of memory" in str(word).lower() for word in cause.args)
        for cause in causes
    )


def find_callable(place: str) -> Any:
    """What ``module:name`` names. Raises ConfigError if it cannot be imported."""
    module, _, name = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(
            f"synthesis.callable={named(place)} cannot be imported ({_told(error)})",
            fix="write module:function, and put the folder of the module on PYTHONPATH",
        ) from error
    return found


def name_of(what: object) -> str:
    """How an error calls a function or an object."""
    return getattr(what, "__qualname__", None) or article(type(what).__name__)
