"""What a model's own files tell of it in a moment, without torch: how long texts it reads, how its layers are called,
whether it has a chat template, whether files lack or are cut short. Where they do not tell, nothing is said, and it is
looked at when torch is loaded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from privlora.config import AdapterSettings, ModelSettings, Settings
from privlora.data.templates import no_chat_template
from privlora.errors import ModelError, Together, no_pattern, rank_too_large, unknown_layers
from privlora.names import EITHER, KINDS, is_of, is_pattern, kind_for, layer_index, selects

_LONGEST_HEADER: Final = 100_000_000  # bytes; safetensors reads no longer one

_NAMED_ALIKE: Final = frozenset(
    {
        *("bloom", "cohere", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo"),
        *("gpt_neox", "gptj", "granite", "llama", "mistral", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2"),
        *("qwen3", "smollm3", "stablelm", "starcoder2"),
    }
)
"""Kinds of models whose layers are called in memory as in their files; transformers renames others while it loads."""


def tells_attention(config: Mapping[str, Any]) -> bool:
    """Whether a model of this configuration is known to have attention by that name, and dense layers beside it that
    are given one row of tokens a record."""
    return config.get("model_type") in _NAMED_ALIKE - {"opt"}


_N_POSITIONS: Final = frozenset(("gpt2", "gpt_bigcode", "gptj"))
"""Kinds that have n_positions for max_position_embeddings."""
_UNTOLD: Final = frozenset(("lm_head", "embed_out", "score"))
"""Layers that files may leave out, since they share the weights of another."""


_BEGINNINGS: Final = ("", "model.", "transformer.", "gpt_neox.", "language_model.", "model.decoder.")
"""What a module's name in memory may begin with beside its name in files, which are of the model without its head."""

_VOCABULARIES: Final = (
    *("tokenizer.json", "tokenizer.model*", "*.model", "*vocab*", "merges*", "bpe*", "dict*"),
    *("*.spm", "*.tiktoken", "*tekken*", "*.tokenizer"),
)
"""Of which a tokenizer has one at least."""
_WITHOUT_ONE: Final = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Classes of tokenizers whose vocabulary is in their code."""
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_POINTER: Final = b"version https://git-lfs"


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
    def in_float16(self) -> bool:
        """Whether it is loaded in float16 where no dtype is asked for."""
        told = self.config.get("dtype") or self.config.get("torch_dtype")
        if told is None and "text_config" not in self.config:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                kinds = (kind for file in self.weights for kind in _dtypes(file))
                told = next((kind for kind in kinds if kind.startswith(("F", "BF"))), None)
        return told in ("float16", "F16") and "quantization_config" not in self.config

    @property
    def layers(self) -> tuple[frozenset[str], frozenset[str]]:
        """All words in the names of its weights, and the last ones of its linear layers; empty where files do not
        tell."""
        if self.config.get("model_type") not in _NAMED_ALIKE or "quantization_config" in self.config:
            return frozenset(), frozenset()
        words = frozenset(word for name in self._shapes for word in name.split("."))
        return words, frozenset(name.rpartition(".")[2] for name in self.linear)

    @cached_property
    def _shapes(self) -> Mapping[str, list[int]]:
        """Of all its weights, by their names in its files."""
        return dict(each for file in sorted(self.folder.glob("*.safetensors")) for each in _tensors(file))

    @property
    def modules(self) -> frozenset[str]:
        """The names of all modules that have weights in its files."""
        return frozenset(name.rpartition(".")[0] for name in self._shapes)

    @property
    def linear(self) -> Mapping[str, tuple[int, int]]:
        """The sizes of its linear layers but for the last one, in the order of their numbers; empty where files do not
        tell."""
        if self.config.get("model_type") not in _NAMED_ALIKE or "quantization_config" in self.config:
            return {}
        found = {
            name.removesuffix(".weight"): (shape[0], shape[1])
            for name, shape in self._shapes.items()
            if name.endswith(".weight") and len(shape) == 2 and any(map(str.isdigit, name.split(".")))
        }
        return dict(sorted(found.items(), key=lambda each: layer_index(each[0]) or 0))

    def may_match(self, pattern: str) -> bool:
        """Whether a regular expression may be of a module's whole name, which may begin otherwise than in files."""
        parts = [name.split(".") for name in self._shapes]
        modules = {".".join(each[:count]) for each in parts for count in range(1, len(each))} | _UNTOLD
        return any(selects(pattern, f"{begin}{name}") for name in modules for begin in _BEGINNINGS)

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

    @property
    def lacks_a_tokenizer(self) -> bool:
        """Whether there is certainly none: no vocabulary, and no class that needs none."""
        if any(next(self.folder.glob(each), None) is not None for each in _VOCABULARIES):
            return False
        own: Any = {}
        with contextlib.suppress(OSError, ValueError):
            own = json.loads((self.folder / "tokenizer_config.json").read_text("utf-8"))
        told = [each for each in (own, self.config) if isinstance(each, Mapping)]
        return not any(each.get("tokenizer_class") in _WITHOUT_ONE or "auto_map" in each for each in told)

    @property
    def damaged(self) -> Path | None:
        """The first of the files of weights that transformers reads whose header says that more of it was written."""
        return next(filter(_is_damaged, self.weights), None)

    @property
    def weights(self) -> list[Path]:
        """One file, or those that an index names."""
        whole = self.folder / _WEIGHTS
        if whole.is_file():
            return [whole]
        try:
            parts = json.loads((self.folder / _INDEX).read_text("utf-8"))["weight_map"].values()
            return [self.folder / name for name in dict.fromkeys(parts)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []


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
    """Names and shapes in a file of safetensors. Raises OSError or ValueError."""
    return ((name, tensor["shape"]) for name, tensor in _header(file).items() if name != "__metadata__")


def _dtypes(file: Path) -> Iterator[str]:
    return (tensor["dtype"] for name, tensor in _header(file).items() if name != "__metadata__")


def _header(file: Path) -> Any:
    """Of a file of safetensors: its length, in 8 bytes, and JSON. Raises OSError or ValueError."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError
        return json.loads(stream.read(length))


def _is_damaged(file: Path) -> bool:
    """Whether a file of safetensors is shorter than its header says, or the header is none."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if 8 + length > size:
                return True
            if length > _LONGEST_HEADER:
                return False
            header = json.loads(stream.read(length))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        return 8 + length + max(ends, default=0) > size
    except OSError:
        return False
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return True


def refuse_incomplete_files(settings: ModelSettings) -> None:
    """Raise ModelError for a local folder of a model without a tokenizer, or with weights that are cut short; both
    together. What a hub's cache holds is left to who loads it: the rest may still be fetched."""
    try:
        files = files_of(settings) if Path(settings.name).expanduser().is_dir() else None
    except (OSError, ValueError, RuntimeError):  # no name of a folder
        return
    if files is None:
        return
    problems = Together()
    if files.lacks_a_tokenizer:
        problems.found.append(
            ModelError(
                f"cannot load model {settings.name!r}: it has no tokenizer.json (nor other tokenizer files)",
                fix="copy the tokenizer files of the base model into it",
            )
        )
    if (damaged := files.damaged) is not None:
        problems.found.append(_damaged(settings.name, damaged))
    problems.tell()


def _damaged(name: str, file: Path) -> ModelError:
    with open(file, "rb") as stream:
        pointer = stream.read(len(_POINTER)) == _POINTER
    return ModelError(
        f"cannot load model {name!r}: {str(file)!r} is "
        + ("a pointer of git LFS, without the weights" if pointer else "cut short or damaged"),
        fix="fetch it with `git lfs pull`" if pointer else "copy it again",
    )


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
    """Raise together what the model's files tell of themselves, as `refuse_incomplete_files`, and of settings that it
    cannot follow: texts that are too long, layers that it does not have (ModelError), messages without a template
    (ConfigError).

    own_template: whether the model's own tokenizer renders messages, unless settings hold a template.
    """
    files, data = files_of(settings.model), settings.data
    if files is None:
        return
    problems = Together()
    problems.of(None, refuse_incomplete_files, settings.model)
    if data.label is None:
        problems.of(None, refuse_encoder_decoder, settings.model.name, files.config)
    if "max_length" in data.model_fields_set and (positions := files.positions) is not None:
        problems.of(None, refuse_too_long, data.max_length, positions)
    unknown = problems.fails(_refuse_unknown_layers, files, settings.adapter.target_modules)
    if not unknown and "r" in settings.adapter.model_fields_set:
        problems.of(None, _refuse_large_rank, files, settings.adapter)
    if settings.model.dtype == "auto" and files.in_float16:
        problems.found.append(in_float16())
    chats = [each["messages"] for each in (data.columns, data.rejected_columns) if each is not None]
    if any(chats) and data.chat_template is None and own_template and files.lacks_a_chat_template:
        problems.found.append(no_chat_template())
    problems.tell()


def refuse_encoder_decoder(name: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a model that reads one text and writes another, as T5 does."""
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"cannot train model {name!r}: it is an encoder with a decoder ({config.get('model_type', 'of no type')})",
            fix="use a decoder-only model, as those of Llama, Qwen or Gemma are",
        )


def in_float16() -> ModelError:
    """The error for a model with float16 weights."""
    return ModelError(
        "the model is stored in float16, whose gradients overflow",
        fix="set model.dtype to bfloat16 or float32 (of a loaded model: model.to(torch.bfloat16))",
    )


def refuse_too_long(max_length: int, positions: int) -> None:
    """Raise ModelError for texts of more tokens than the model reads."""
    if max_length > positions:
        raise ModelError(
            f"data.max_length={max_length} exceeds the {positions} positions of the model",
            why="a longer record would end a step before it is charged, or change the positions of others beside it",
            fix=f"set data.max_length to at most {positions}",
        )


def _refuse_unknown_layers(files: ModelFiles, targets: str | list[str]) -> None:
    if isinstance(targets, str) and not is_pattern(targets):
        raise no_pattern(targets)
    try:
        words, linear = files.layers
        if isinstance(targets, str):
            if targets not in (*KINDS, EITHER) and linear and not files.may_match(targets):
                raise unknown_layers([targets], sorted(linear))
            return
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    missing = [name for name in targets if name.split(".")[-1] not in words | _UNTOLD]
    if linear and missing:
        raise unknown_layers(missing, sorted(linear))


def _refuse_large_rank(files: ModelFiles, adapter: AdapterSettings) -> None:
    """Raise ModelError for a rank above the smaller side of a layer that is adapted."""
    targets, layers = adapter.target_modules, adapter.layers_to_transform
    try:
        linear = files.linear
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if targets == EITHER:
        targets = kind_for(list(linear), files.modules)
    if isinstance(targets, str) and targets not in KINDS:  # names in files may begin otherwise
        return
    chosen = {
        name: sizes
        for name, sizes in linear.items()
        if (is_of(targets, name) if isinstance(targets, str) else selects(targets, name))
        and not selects(list(adapter.exclude_modules), name)
        and (layers is None or layer_index(name) in layers)
    }
    narrow = {name: sizes for name, sizes in chosen.items() if min(sizes) < adapter.r}
    # Words leave them out, where others are left.
    if narrow and (isinstance(targets, list) or len(narrow) == len(chosen)):
        name, sizes = next(iter(narrow.items()))
        raise rank_too_large(adapter.r, name, sizes, min(map(min, narrow.values())))
