"""Private records pass by on their way to tokens, and tokens that are kept are those that would be made again."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_cases import PRIVACY, PUBLIC, RECORDS, STEPS, Bench, StopAt
from tiny_models import byte_tokenizer, tiny_tokenizer
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerBase

import privlora.training.inputs as inputs
import privlora.training.token_cache as token_cache
from privlora.api import fine_tune, resume_run
from privlora.config import Settings, settings_from
from privlora.errors import ConfigError, DataError, PrivacyError
from privlora.training.files import RunFolder, temporary_files
from privlora.training.inputs import Data, load_data
from privlora.training.loop import Interrupted
from privlora.training.token_cache import Kept, kept_in, key_of

pytestmark = pytest.mark.usefixtures("quick_reports")

NAMED = [{**record, "name": f"p{i // 2}", "more": "and left"} for i, record in enumerate(RECORDS)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, NAMED)))
    return path


def settings(file: Path, *, user: bool = False, **data: Any) -> Settings:
    by_user = {"unit": "user", "user_column": "name", "public_dataset_size": 15} if user else {}
    groups = {
        "model": {"name": "tiny"},
        "data": {"path": str(file), "max_length": 40, "cache": True, **data},
        "privacy": {**PRIVACY, **by_user},
        "method": {"name": "prism"},
    }
    return settings_from(groups)


def load(given: Settings, cache: Path | None, **options: Any) -> Data:
    return load_data(given, tiny_tokenizer(), cache=cache, **options)


class Counted:
    """Records that were tokenised while this stands in the place of ``inputs._build``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.records, self._build = 0, inputs._build
        patch.setattr(inputs, "_build", self)

    def __call__(self, records: Any, *given: Any) -> Any:
        found = self._build(records, *given)
        self.records += len(found)
        return found


def test_a_resumed_run_makes_no_tokens(
    bench: Bench, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    own = {"model": bench.model, "tokenizer": bench.tokenizer}
    with pytest.raises(Interrupted):
        fine_tune(
            bench.model,
            str(file),
            tokenizer=bench.tokenizer,
            privacy=PRIVACY,
            adapter={"r": 2},
            columns={"max_length": 40, "cache": True},
            output=folder.root,
            evaluation=PUBLIC,
            observer=StopAt(4),
        )
    assert folder.tokens.parent == folder.private
    assert stat.S_IMODE(folder.tokens.stat().st_mode) == 0o600
    counted = Counted(monkeypatch)
    assert resume_run(folder.root, **own, evaluation=PUBLIC).steps == STEPS
    assert counted.records == len(PUBLIC)
    tokens = folder.tokens.read_bytes()[-1000:]
    assert not any(tokens in path.read_bytes() for path in folder.release.rglob("*") if path.is_file())
    assert not temporary_files(folder.private)


def test_nothing_is_kept_unless_it_is_asked_for(bench: Bench, file: Path, tmp_path: Path) -> None:
    assert (
        settings_from({**settings(file).model_dump(exclude={"data"}), "data": {"path": "x.txt"}}).data.cache
        is False
    )
    cache = tmp_path / "tokens.cache"
    assert load(settings(file, cache=False), cache).source is None
    assert not cache.exists()


@pytest.mark.parametrize("user", [False, True], ids=["records", "users"])
def test_what_is_kept_is_what_would_be_made(
    user: bool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "tokens.cache"
    made = load(settings(file, user=user), cache)
    counted = Counted(monkeypatch)
    kept = load(settings(file, user=user), cache)
    assert counted.records == 0
    assert [e.digest for e in kept.examples] == [e.digest for e in made.examples]
    assert [u.tolist() for u in kept.units] == [u.tolist() for u in made.units]
    assert kept.examples.pad_token_id == made.examples.pad_token_id
    assert kept.units.max_records_per_unit == made.units.max_records_per_unit
    sent = pickle.loads(pickle.dumps(kept))  # noqa: S301 - as the first of several processes tells it to the others
    assert sent.proof == Data(sent.examples, sent.units, sent.evaluation).proof == made.proof
    again = Data(kept.examples, kept.units, kept.evaluation)
    assert kept.summary == made.summary == again.summary
    assert kept.proof == made.proof == again.proof
    assert not kept.examples.tokens.ids.flags.writeable


def test_the_proof_of_records_and_units(file: Path) -> None:
    data = load(settings(file, user=True), None)
    units = [sha256(b"".join(sorted(data.examples[i].digest for i in unit))).digest() for unit in data.units]
    assert data.proof == sha256(b"".join(sorted(units))).hexdigest()


def _cut(whole: bytes) -> bytes:
    return whole[:-1]


def _flipped(place: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


def _with_a_right_digest(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def changed(whole: bytes) -> bytes:
        assert len(old) == len(new)
        rest = whole[64:].replace(old, new, 1)
        assert rest != whole[64:]
        return sha256(rest).digest() + whole[32:64] + rest

    return changed


@pytest.mark.parametrize(
    "damage",
    [
        *(_cut, _flipped(0), _flipped(64), _flipped(-700), lambda _: b"", lambda _: b"x" * 500),
        *(_with_a_right_digest(b'"key"', b'"kez"'), _with_a_right_digest(b'"facts"', b'"facty"')),
        *(_with_a_right_digest(b'{"key": "', b'["key", "'), _with_a_right_digest(b'{"key": ', b"[       ")),
    ],
    ids=[
        *("cut", "digest", "head", "tokens", "empty", "another file"),
        *("no key", "no facts", "no JSON", "no JSON either"),
    ],
)
def test_a_damaged_file_is_made_again(
    damage: Callable[[bytes], bytes], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "tokens.cache"
    made = load(settings(file), cache)
    whole = cache.read_bytes()
    cache.write_bytes(damage(whole))
    counted = Counted(monkeypatch)
    assert load(settings(file), cache).proof == made.proof
    assert counted.records == len(RECORDS)
    assert cache.read_bytes() == whole


def _with(name: str, change: Callable[[np.ndarray], object]) -> Callable[[Kept], Kept]:
    """With another array ``name``: what ``change`` returns, or left of the copy that it was given."""

    def changed(kept: Kept) -> Kept:
        own = kept if hasattr(kept, name) else kept.tokens
        array = getattr(own, name).copy()
        found = change(array)
        given = {name: array if found is None else found}
        return replace(kept, **(given if own is kept else {"tokens": replace(kept.tokens, **given)}))

    return changed


def _put(place: int, value: int) -> Callable[[np.ndarray], None]:
    return lambda array: array.__setitem__(place, value)


MISFITS: dict[str, Callable[[Kept], Kept]] = {
    "a unit without records": _with("unit_of_record", lambda units: np.where(units == 3, 4, units)),
    "a unit beyond": _with("unit_of_record", _put(-1, 10**9)),
    "a unit below": _with("unit_of_record", _put(0, -1)),
    "units of fewer": _with("unit_of_record", lambda units: units[:-1]),
    "an example beyond": _with("starts", _put(-1, 10**9)),
    "examples that run back": _with("starts", _put(1, 10**9)),
    "a start too few": _with("starts", lambda starts: starts[1:]),
    "edges beyond": _with("edge_starts", _put(-1, 10**9)),
    "half a run": _with("edge_starts", lambda starts: starts + (np.arange(len(starts)) == 1)),
    "a label beyond": _with("edges", _put(1, 1000)),
    "a negative token": _with("ids", _put(0, -1)),
    "tokens of 64 bits": _with("ids", lambda ids: ids.astype(np.int64)),
    "blanks of fewer": _with("blank", lambda blank: blank[1:]),
    "short hashes": _with("contents", lambda contents: contents[:, :8]),
    "no summary": lambda kept: replace(kept, summary=Told({})),  # type: ignore[arg-type]
    "a summary of words": lambda kept: replace(kept, summary=replace(kept.summary, cut="much")),  # type: ignore[arg-type]
    "of other units": lambda kept: replace(kept, summary=replace(kept.summary, units=7)),
    "a summary of more": lambda kept: replace(kept, summary=Told({**kept.summary.to_dict(), "more": 1})),  # type: ignore[arg-type]
    "a list for a summary": lambda kept: replace(kept, summary=Told([1])),  # type: ignore[arg-type]
    "no proof": lambda kept: replace(kept, proof=None),  # type: ignore[arg-type]
}


@dataclass
class Told:
    """What is written in a summary's place."""

    content: Any

    def to_dict(self) -> Any:
        return self.content


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS)
def test_a_file_whose_parts_do_not_fit_is_made_again(
    misfit: Callable[[Kept], Kept], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest and key are right, as of a program that wrote it wrongly."""
    cache = tmp_path / "tokens.cache"
    made = load(settings(file), cache)
    whole = cache.read_bytes()
    key = key_of(settings(file).data, None, tiny_tokenizer())
    assert key is not None
    kept = kept_in(cache, key)
    assert kept is not None
    token_cache.keep(cache, key, misfit(kept))
    assert cache.read_bytes() != whole
    counted = Counted(monkeypatch)
    assert load(settings(file), cache).proof == made.proof
    assert counted.records == len(RECORDS)
    assert cache.read_bytes() == whole


def test_tokens_of_other_records_are_not_taken(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "tokens.cache"
    load(settings(file), cache)
    counted = Counted(monkeypatch)
    shorter = load(settings(file, max_length=30), cache)
    assert counted.records == len(RECORDS)
    assert shorter.examples.lengths.max() == 30
    assert load(settings(file, max_length=30), cache).proof == shorter.proof
    assert counted.records == len(RECORDS)


def test_a_cache_that_cannot_be_written_fails_no_run(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    assert len(load(settings(file), tmp_path / "tokens.cache").examples) == len(RECORDS)
    assert "No space left" in caplog.text
    assert not list(tmp_path.glob(".*"))


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def chatting(template: str = CHAT, **named: Any) -> Any:
    """A tokenizer with a chat template, and with other attributes."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    for name, value in named.items():
        setattr(tokenizer, name, value)
    return tokenizer


def test_what_tokens_depend_on_changes_their_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(tokenizer: Any = None, **data: Any) -> str:
        found = key_of(settings(file, **data).data, None, tokenizer or tiny_tokenizer())
        assert found is not None
        return found

    first = key()
    marked, longer = tiny_tokenizer(), byte_tokenizer()
    marked.add_tokens(["patient"])
    forms = {"prompt": "text", "completion": "more"}
    found = [
        first,
        key(max_length=41),
        key(text="more"),
        key(add_eos=False),
        key(limit=29),
        key(**forms),
        key(**forms, loss_on="completion"),
        key(marked),
        key(longer),
        key(chatting(), messages="text"),
        key(chatting(CHAT + "{% if messages | length > 9 %}.{% endif %}"), messages="text"),
        key(chatting(sep_token="</s>"), messages="text"),
        key(chatting("{{ raise_exception('none') }}"), messages="text"),
        key(chatting(split_special_tokens=True)),
        key(task="sst2"),
        key(task="cola"),
        key(format="text"),
    ]
    for module in (token_cache, token_cache.transformers, token_cache.tokenizers):
        with monkeypatch.context() as other:
            other.setattr(module, "__version__", "0.0")
            found.append(key())
    with monkeypatch.context() as other:
        other.setattr(PreTrainedTokenizerBase, "apply_chat_template", lambda *_, **named: "as elsewhere")
        found.append(key(chatting(), messages="text"))
    of_user = key_of(settings(file).data, "name", tiny_tokenizer())
    assert of_user is not None
    assert len({*found, of_user}) == len(found) + 1
    assert key() == first
    used = tiny_tokenizer()
    used(["a", "a longer one"], padding=True, truncation=True, max_length=3)
    assert key(used) == first  # what an earlier call asked for is none of it
    moved = Path(shutil.copy(file, file.with_name("moved.jsonl")))
    assert key_of(settings(moved).data, None, tiny_tokenizer()) == first
    moved.write_bytes(moved.read_bytes().replace(b"patient 3", b"patient 4"))
    assert key_of(settings(moved).data, None, tiny_tokenizer()) != first
    with gzip.open(zipped := file.with_name("zipped.jsonl.gz"), "wb") as stream:
        stream.write(file.read_bytes())
    assert key_of(settings(zipped).data, None, tiny_tokenizer()) != first


def test_a_tokenizer_with_code_of_its_own_has_no_key(file: Path) -> None:
    tokenizer = tiny_tokenizer()

    class Own(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, *given: Any, **named: Any) -> str:
            return "its own"

    tokenizer.__class__ = Own
    assert key_of(settings(file).data, None, tokenizer) is None


def test_a_tokenizer_with_a_part_in_python_has_no_key(file: Path, tmp_path: Path) -> None:
    class Own:
        def pre_tokenize(self, text: Any) -> None:
            """Leaves it whole."""

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Own())
    assert key_of(settings(file).data, None, tokenizer) is None
    data = load_data(settings(file), tokenizer, cache=tmp_path / "tokens.cache")
    assert len(data.examples) == len(RECORDS)
    assert not (tmp_path / "tokens.cache").exists()


@pytest.mark.parametrize("named", [False, True], ids=["one", "several"])
def test_a_chat_template_that_tells_the_time_has_no_key(named: bool, file: Path) -> None:
    template: Any = CHAT + "{{ strftime_now('%d') }}"
    tokenizer = chatting({"default": template} if named else template)  # type: ignore[arg-type]
    assert key_of(settings(file, messages="text").data, None, tokenizer) is None
    assert key_of(settings(file).data, None, tokenizer) is not None  # who renders no chat


def test_files_that_change_meanwhile_are_not_kept(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = inputs.iterate_records

    def changing(*given: Any, **named: Any) -> Iterator[Any]:
        yield from read(*given, **named)
        file.write_text(file.read_text() + "\n")

    monkeypatch.setattr(inputs, "iterate_records", changing)
    cache = tmp_path / "tokens.cache"
    load(settings(file), cache)
    assert not cache.exists()


@pytest.mark.parametrize("changed", [str.upper, lambda text: text], ids=["in other letters", "as it is"])
def test_public_records_are_held_against_kept_ones(
    changed: Callable[[str], str], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_BLOCK", 2)
    cache = tmp_path / "tokens.cache"
    load(settings(file), cache)
    public = [*PUBLIC, {"text": changed(RECORDS[7]["text"])}]
    with pytest.raises(
        PrivacyError, match=r"data\.evaluation holds records that are the same as private ones in text"
    ):
        load(settings(file), cache, evaluation=public)
    both = settings(file, text="{text}{more}")
    load(both, cache)
    other_columns = {"text": RECORDS[7]["text"] + "and left", "more": ""}
    with pytest.raises(PrivacyError, match="same as private ones to the model"):
        load(both, cache, evaluation=[other_columns])


@pytest.mark.parametrize(
    ("data", "words"),
    [({"path": "hf://a/b:train"}, "these records are in none"), ({"path": ["a.txt", "hf://b"]}, "in none")],
)
def test_records_in_no_file_are_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(Path("x"), **data)


def test_records_in_memory_and_federations_are_refused(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="these records are in none"):
        bench.start(tmp_path / "run", columns={"cache": True})
    assert not (tmp_path / "run").exists()


def test_records_pass_by(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 900 records, no more are there at a time than are tokenised together."""

    class Mark:
        """Lives as long as the record that holds it."""

    alive, most = weakref.WeakSet[Mark](), 0

    def many(*given: Any, **named: Any) -> Iterator[dict[str, Any]]:
        nonlocal most
        for number in range(900):
            record = {"text": f"patient {number}", "mark": Mark()}
            alive.add(record["mark"])
            most = max(most, len(alive))
            yield record

    monkeypatch.setattr(inputs, "iterate_records", many)
    monkeypatch.setattr("privlora.data.examples._CHUNK", 100)
    data = load(settings(file, cache=False, unchecked=True), None, evaluation=PUBLIC)
    assert len(data.examples) == 900
    assert most <= 101


def test_an_error_late_in_a_file_names_its_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    rows = [{"text": f"patient {i}"} for i in range(1200)]
    rows[1100] = {"txet": "secret"}
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="record 1101 has no column 'text'"):
        load(settings(path), None)
