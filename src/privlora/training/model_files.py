"""What a model's own files tell of it in a moment, without torch: how long texts it reads, how its layers are called,
whether it has a chat template. Where they do not tell, nothing is said, and it is looked at when torch is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from privlora.config import ModelSettings, Settings
from privlora.data.templates import no_chat_template
from privlora.errors import ModelError, Together, unknown_layers

_LONGEST_HEADER: Final = 100_000_000  # bytes; safetensors reads no longer one

_NAMED_ALIKE: Final = frozenset(
    {
        *("bloom", "cohere", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo"),
        *("gpt_neox", "gptj", "granite", "llama", "mistral", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2"),
        *("qwen3", "smollm3", "stablelm", "starcoder2"),
    }
)
"""Kinds of models whose layers are called in memory as in their files; transformers renames others while it loads."""
_N_POSITIONS: Final = frozenset(("gpt2", "gpt_bigcode", "gptj"))
"""Kinds that have n_positions for max_position_embeddings."""
_UNTOLD: Final = frozenset(("lm_head", "embed_out", "score"))
"""Layers that files may leave out, since they share the weights of another."""


@dataclass(frozen=True)
class ModelFiles:
    """Of a folder with config.json."""

    folder: Path
    config: Mapping[str, Any]

    @property
    def positions(self) -> int | None:
        """How many tokens the model reads at most; None where more than one number has a say in it."""
        config = self.config
        ropes = [config.get(name) for name in ("rope_scaling", "rope_parameters")]
        if (
            "text_config" in config
            or "original_max_position_embeddings" in config
            or not all(map(_plain, ropes))
        ):
            return None
        own = "n_positions" if config.get("model_type") in _N_POSITIONS else "max_position_embeddings"
        found = config.get(own)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    @property
    def layers(self) -> tuple[frozenset[str], frozenset[str]]:
        """All words in the names of its weights, and the last ones of its linear layers; empty where files do not
        tell."""
        if self.config.get("model_type") not in _NAMED_ALIKE or "quantization_config" in self.config:
            return frozenset(), frozenset()
        shapes = dict(each for file in sorted(self.folder.glob("*.safetensors")) for each in _tensors(file))
        words = frozenset(word for name in shapes for word in name.split("."))
        linear = frozenset(
            parts[-2]
            for name, shape in shapes.items()
            if (parts := name.split("."))[-1] == "weight" and len(shape) == 2 and any(map(str.isdigit, parts))
        )
        return words, linear

    @property
    def lacks_a_chat_template(self) -> bool:
        """Whether its tokenizer certainly has none."""
        if (self.folder / "chat_template.jinja").exists() or (
            self.folder / "additional_chat_templates"
        ).exists():
            return False
        try:
            return not json.loads((self.folder / "tokenizer_config.json").read_text("utf-8")).get(
                "chat_template"
            )
        except (OSError, ValueError, AttributeError):
            return False


def _plain(rope: Any) -> bool:
    """Whether rotary positions are as many as the model says they are."""
    if not rope:
        return True
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        return False
    return rope.get("rope_type", rope.get("type", "default")) == "default" and not any(
        name in rope for name in ("factor", "original_max_position_embeddings")
    )


def _tensors(file: Path) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes in the header of a file of safetensors: its length, in 8 bytes, and JSON. Raises OSError or
    ValueError."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError
        header = json.loads(stream.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, tensor["shape"]


def files_of(settings: ModelSettings) -> ModelFiles | None:
    """Those of a local folder, or of what the hub's cache holds; None where there are none that can be read."""
    folder = Path(settings.name).expanduser()
    try:
        if not folder.is_dir():
            from huggingface_hub import try_to_load_from_cache

            kept = try_to_load_from_cache(settings.name, "config.json", revision=settings.revision)
            if not isinstance(kept, str):
                return None
            folder = Path(kept).parent
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return ModelFiles(folder, config) if isinstance(config, dict) else None


def refuse_unfit_files(settings: Settings, *, own_template: bool = True) -> None:
    """Raise together what the model's files tell of settings that it cannot follow: texts that are too long, layers
    that it does not have (ModelError), messages without a template (ConfigError).

    own_template: whether the model's own tokenizer renders messages, unless settings hold a template.
    """
    files, data = files_of(settings.model), settings.data
    if files is None:
        return
    problems = Together()
    if "max_length" in data.model_fields_set and (positions := files.positions) is not None:
        problems.of(None, refuse_too_long, data.max_length, positions)
    problems.of(None, _refuse_unknown_layers, files, settings.adapter.target_modules)
    chats = [each["messages"] for each in (data.columns, data.rejected_columns) if each is not None]
    if any(chats) and data.chat_template is None and own_template and files.lacks_a_chat_template:
        problems.found.append(no_chat_template())
    problems.tell()


def refuse_too_long(max_length: int, positions: int) -> None:
    """Raise ModelError for texts of more tokens than the model reads."""
    if max_length > positions:
        raise ModelError(
            f"data.max_length={max_length} exceeds the {positions} positions of the model",
            why="a longer record would end a step before it is charged, or change the positions of others beside it",
            fix=f"set data.max_length to at most {positions}",
        )


def _refuse_unknown_layers(files: ModelFiles, targets: str | list[str]) -> None:
    """Of a list of targets alone: patterns are of whole names."""
    if isinstance(targets, str):
        return
    try:
        words, linear = files.layers
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    missing = [name for name in targets if name.split(".")[-1] not in words | _UNTOLD]
    if linear and missing:
        raise unknown_layers(missing, sorted(linear))
