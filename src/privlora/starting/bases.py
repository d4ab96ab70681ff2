"""What can be known of a base model from the files that are here: no weights are read, and nobody is asked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from privlora.training.preflight import files_of, in_float16, refuse_encoder_decoder, refuse_unknown_model

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "seq_length")
_NAMED_ALIKE: Final = frozenset(
    {
        *("bloom", "cohere", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo"),
        *("gpt_neox", "gptj", "granite", "llama", "mistral", "olmo", "olmo2", "phi", "phi3", "qwen2"),
        *("qwen3", "smollm3", "stablelm", "starcoder2"),
    }
)
"""Kinds of models that are known to have attention by that name, and dense layers next to it that are given one row of
tokens a record."""
_CHARACTERS = 3.0  # a token, where no tokenizer is at hand: few languages have fewer


@dataclass(frozen=True)
class Base:
    """name: as given. local: whether it is a folder. positions: how many tokens it reads, if it says so. chats:
    whether its tokenizer has a chat template; None if that is not known. tokenizer: to count tokens with. dense:
    whether it surely has feed-forward layers by the names that target_modules knows. in_float16: whether it is loaded
    so where no dtype is asked for. unproven: whether it is of a kind whose
    layers have to be looked at."""

    name: str
    local: bool
    positions: int | None
    chats: bool | None
    tokenizer: Any = None
    dense: bool = False
    in_float16: bool = False
    unproven: bool = False

    def tokens_per_character(self, texts: Iterable[str]) -> float:
        """Of these texts; a cautious guess without a tokenizer or without texts."""
        texts = [text for text in texts if text]
        characters = sum(map(len, texts))
        if self.tokenizer is None or not characters:
            return 1 / _CHARACTERS
        return sum(len(each.ids) for each in self.tokenizer.encode_batch(texts)) / characters


def look_at(name: str) -> Base:
    """Raises ModelError for what is neither a local folder nor the name of a model on the hub."""
    refuse_unknown_model(name)
    folder = Path(name).expanduser()
    files = files_of(name)
    here = folder if files is None else files.folder
    settings, chats = _json(here / "tokenizer_config.json"), None
    if settings is not None:
        chats = bool(settings.get("chat_template")) or (here / "chat_template.jinja").is_file()
    config = {} if files is None else dict(files.config)
    refuse_encoder_decoder(name, config)
    dense = config.get("model_type") in _NAMED_ALIKE
    return Base(
        name,
        folder.is_dir(),
        _positions(config),
        chats,
        _tokenizer(here / "tokenizer.json"),
        dense,
        in_float16=files is not None and in_float16(files),
        unproven="model_type" in config and not dense,
    )


def _json(file: Path) -> dict[str, Any] | None:
    """Empty for a file that cannot be read, which loading the model says; None where there is none."""
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _positions(config: dict[str, Any]) -> int | None:
    """The smallest that it states; training may allow more where positions are stretched."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    stretched = config.get("rope_scaling") or config.get("rope_parameters")
    places = [config, stretched if isinstance(stretched, dict) else {}]
    names = (*_POSITIONS, "original_max_position_embeddings")
    found = [place[name] for place in places for name in names if isinstance(place.get(name), int)]
    return min((number for number in found if number > 1), default=None)


def _tokenizer(file: Path) -> Any:
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - of a Rust library, which raises Exception; loading the model says so
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
