"""Where chat templates are rendered: as in transformers, and no chance, no clock and no address reaches a text.

What is printed is plain: strings, numbers, None, and lists and mappings of such. All else that a template can hold
(what `map` passes on, methods, joiners, functions) shows its address in memory, which follows from whatever was
rendered before.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE: Final = "26 Jul 2024"
"""What `strftime_now` gives, whatever the day and the format: no clock reaches a text. Llama's own say it
where there is no clock."""

_CHECK: Final = "privlora_printable"
_PASSED_ON: Final = "prints what a filter passes on, and not the items of it (as |list does)"


class TemplateRefusedError(jinja2.TemplateError):
    """What a template does so that its text is no function of the record. The message holds nothing of a record."""


class _Passing(Iterator[Any]):
    """What a filter passes on, item by item; each has to be plain, and it is no text itself."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __next__(self) -> Any:
        item = next(self._items)
        return item if isinstance(item, _Passing) else printable(item)

    def __repr__(self) -> str:
        raise TemplateRefusedError(_PASSED_ON)


def printable(value: Any) -> Any:
    """The value. Raises TemplateRefusedError for one that is not plain all through."""
    if value is None or isinstance(value, str | int | float | jinja2.Undefined | range):
        return value
    if isinstance(value, Mapping):
        parts: Any = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | KeysView | ValuesView | ItemsView):
        parts = value
    elif isinstance(value, _Passing):
        raise TemplateRefusedError(_PASSED_ON)
    else:
        raise TemplateRefusedError(f"prints the address in memory of a {type(value).__name__}")
    for part in parts:
        printable(part)
    return value


def _check(arguments: list[Any]) -> None:
    """What is passed on is checked item by item, by whoever takes it."""
    for value in arguments:
        if not isinstance(value, _Passing):
            printable(value)


def _checked(filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes plain values, or what another one passes on, alone."""
    own = int(hasattr(filter, "jinja_pass_arg"))  # the context, as the first argument

    @functools.wraps(filter)
    def checked(*arguments: Any, **named: Any) -> Any:
        _check([*arguments[own:], *named.values()])
        found = filter(*arguments, **named)
        return _Passing(found) if isinstance(found, Iterator) and not isinstance(found, _Passing) else found

    return checked


def _chance(*_: Any, **__: Any) -> Any:
    raise TemplateRefusedError("draws at random")


def _pprint(*_: Any, **__: Any) -> Any:
    raise TemplateRefusedError("prints by 'pprint', whose order may follow addresses in memory; use tojson")


def _same(value: Any, other: Any) -> bool:
    if not (other is None or isinstance(other, bool)):
        # Which strings and numbers are one object is an accident.
        raise TemplateRefusedError("asks by 'sameas' for more than true, false or none; use ==")
    return value is other


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers has it, instead of Jinja's, which escapes HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> Any:
    raise jinja2.TemplateError(str(printable(message)))


class _Dict:
    """`dict` of templates, without attributes of Python's."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _Generation(Extension):
    """transformers' tag around what an assistant wrote: its body alone, however its blanks are trimmed."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """Of chat templates: switches, tags, filters and globals of transformers'."""

    intercepted_binops = frozenset({"%"})

    def __init__(self) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=printable)
        filters = {**self.filters, "tojson": _tojson, "random": _chance, "pprint": _pprint, _CHECK: printable}
        self.filters = {name: _checked(filter) for name, filter in filters.items()}
        self.tests["sameas"] = _same
        self.globals |= {
            "lipsum": _chance,
            "strftime_now": lambda *_: DATE,
            "raise_exception": _raise,
            "dict": _Dict(),
            "namespace": Namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """With a check of what `~` makes a text of, which no finalize sees."""
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all(nodes.Concat)):
            node.nodes = [
                nodes.Filter(part, _CHECK, [], [], None, None, lineno=part.lineno) for part in node.nodes
            ]
        return tree.set_environment(self)  # type: ignore[return-value]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`%`, which formats where its left side is a string."""
        return super().call_binop(
            context, operator, left, printable(right) if isinstance(left, str) else right
        )

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call, of a string's methods with what is plain alone: some of them format."""
        called = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(called, "__self__", None)
        if issubclass(owner if isinstance(owner, type) else type(owner), str):  # also Markup's own, as escape
            _check([*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)


def rendering(
    text: str, tokenizer: PreTrainedTokenizerBase
) -> Callable[[list[dict[str, Any]], bool, Any, Mapping[str, Any]], str]:
    """What transformers' `apply_chat_template` makes of messages of JSON's kinds, whether an answer is asked for, tools
    and further variables. Raises jinja2's errors; those of the record, when the result is called."""
    from transformers.utils import chat_template_utils as theirs

    template = Environment().from_string(text)
    # Newer ones give a field of thoughts several names.
    alias = getattr(theirs, "_alias_reasoning_fields", list)
    variables = {"documents": None, **tokenizer.special_tokens_map}

    def render(
        messages: list[dict[str, Any]], add_generation_prompt: bool, tools: Any, told: Mapping[str, Any]
    ) -> str:
        return template.render(
            messages=alias([_inert(message) for message in messages]),
            add_generation_prompt=add_generation_prompt,
            tools=_inert(tools),
            **{**variables, **told},
        )

    return render


def _inert(value: Any) -> Any:
    """Without objects, whose methods a template could call: a word stands in their place, as in transformers."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_inert(key): _inert(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_inert(part) for part in value]
    return f"<{type(value).__name__}>"
