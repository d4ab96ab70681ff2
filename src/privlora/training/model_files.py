"""What a model's own files tell of it in a moment, without torch: whether it has a chat template, whether it is
stored in float16, whether files lack or are cut short. What they do not tell is looked at when torch is loaded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from privlora.config import ModelSettings, Settings
from privlora.data.templates import no_chat_template
from privlora.errors import ModelError, Together

_NAMED_ALIKE: Final = frozenset(
    {
        *("bloom", "cohere", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo"),
        *("gpt_neox", "gptj", "granite", "llama", "mistral", "olmo", "olmo2", "phi", "phi3", "qwen2"),
        *("qwen3", "smollm3", "stablelm", "starcoder2"),
    }
)
"""Kinds of models of which that is known."""


def tells_attention(config: Mapping[str, Any]) -> bool:
    """Whether a model of this configuration is known to have attention by that name, and dense layers beside it that
    are given one row of tokens a record."""
    return config.get("model_type") in _NAMED_ALIKE


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
    def in_float16(self) -> bool:
        """Whether it is loaded in float16 where no dtype is asked for."""
        told = self.config.get("dtype") or self.config.get("torch_dtype")
        if told is None and "text_config" not in self.config:
            with contextlib.suppress(OSError, SafetensorError):
                kinds = (kind for file in self.weights for _, _, kind in _tensors(file))
                told = next((kind for kind in kinds if kind.startswith(("F", "BF"))), None)
        return told in ("float16", "F16") and "quantization_config" not in self.config

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


def _tensors(file: Path) -> Iterator[tuple[str, list[int], str]]:
    """Names, shapes and dtypes in a file of safetensors. Raises OSError or SafetensorError."""
    with safe_open(file, "np") as found:
        for name in found.keys():  # noqa: SIM118 - it is no mapping
            each = found.get_slice(name)
            yield name, each.get_shape(), each.get_dtype()


def _is_damaged(file: Path) -> bool:
    """Whether a file of safetensors is shorter than its header says, or the header is none."""
    try:
        with safe_open(file, "np"):
            return False
    except SafetensorError:
        return True
    except OSError:
        return False


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
    cannot follow: weights in float16 (ModelError), messages without a template (ConfigError).

    own_template: whether the model's own tokenizer renders messages, unless settings hold a template.
    """
    files, data = files_of(settings.model), settings.data
    if files is None:
        return
    problems = Together()
    problems.of(None, refuse_incomplete_files, settings.model)
    if data.label is None:
        problems.of(None, refuse_encoder_decoder, settings.model.name, files.config)
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
