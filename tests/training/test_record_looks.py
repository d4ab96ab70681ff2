"""Records that cannot be used are told together, by their lines; nothing of them is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_tokenizer

from privlora.config import DataSettings, Settings, settings_from
from privlora.data.units import Grouping
from privlora.errors import DataError, PrivloraError
from privlora.federated.run import records_of
from privlora.training.inputs import load_all, load_clients
from privlora.training.preflight import check_of, refuse_unusable, refuse_unusable_files

SECRET = "Zanzibar"


def lines(path: Path, *rows: Any) -> str:
    """A file of JSON lines; a string is written as it is."""
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in rows))
    return str(path)


def said(path: str, owner: str | None = None, limit: int | None = None, **data: Any) -> list[str]:
    """What is told of a file, in lines."""
    check = check_of(DataSettings(path=path, **data), Grouping(owner))
    with pytest.raises(DataError) as caught:
        refuse_unusable_files([path], "auto", limit, check)
    assert SECRET not in str(caught.value)
    return [one.what.replace(path, "FILE") for one in caught.value.each()]


def test_all_that_is_wrong_is_told_by_its_lines(tmp_path: Path) -> None:
    good, null = {"text": SECRET}, {"text": None}
    path = lines(
        tmp_path / "a.jsonl", good, null, "", f"{SECRET} {{", null, {"note": SECRET}, f'["{SECRET}"]', 3
    )
    assert said(path) == [
        "FILE, lines 2, 5: column 'text' is empty (null)",
        "FILE, line 4: this is not JSON",
        "FILE, line 6: has no column 'text'; its columns are: note",
        "FILE, line 7: this is a JSON list, not an object with columns",
        "FILE, line 8: this is a JSON int, not an object with columns",
    ]


def test_five_places_and_five_mistakes_are_told(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *[{"text": None}] * 8)
    assert said(path) == ["FILE, lines 1, 2, 3, 4, 5 and more: column 'text' is empty (null)"]
    path = lines(
        tmp_path / "b.jsonl", *({name: 1} for name in ("id", "user", "date", "note", "title", "age", "sex"))
    )
    told = said(path)
    assert len(told) == 6
    assert told[-1] == "other records have other mistakes"
    path = lines(tmp_path / "c.jsonl", *["{"] * 7)
    assert said(path) == ["FILE, lines 1, 2, 3, 4, 5 and more: this is not JSON"]


CHAT = {"messages": "chat"}
TURN = {"role": "user", "content": None}
CLASSES: dict[str, Any] = {"label": "y", "labels": ["u", "v"]}


@pytest.mark.parametrize(
    ("data", "row", "what"),
    [
        (CHAT, {"chat": [{"role": SECRET}]}, "line 2: message 1 of column 'chat' has no known role"),
        (CHAT, {"chat": SECRET}, "line 2: column 'chat' is not a list of messages"),
        (CHAT, {"chat": [TURN]}, "line 2: message 1 of column 'chat' has no content"),
        (
            {"prompt": "{a}{b}", "completion": "c"},
            {"a": SECRET, "b": 4, "c": ""},
            "line 2: column 'b' holds int",
        ),
        (CLASSES, {"text": "", "y": SECRET}, "line 2: the label in column 'y' is none"),
        (
            {"task": "sst2"},
            {"sentence": "", "label": SECRET},
            "line 2: column 'label' holds no label of task sst2",
        ),
        (
            {"chosen": "c", "rejected": "d", "prompt": "p"},
            {"p": "", "c": "", "d": None},
            "line 2: column 'd' is",
        ),
    ],
)
def test_each_form_of_records(data: dict[str, Any], row: dict[str, Any], what: str, tmp_path: Path) -> None:
    good = {
        **dict.fromkeys(("text", "a", "b", "c", "d", "p", "sentence"), ""),
        "chat": [{"from": "human", "value": SECRET}],
        "y": "v",
        "label": 0,
    }
    (told,) = said(lines(tmp_path / "a.jsonl", good, row, good), **data)
    assert told.startswith(f"FILE, {what}")


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.csv", 'text,n\n"one\ntwo",1\nthree\n', "line 4: fewer fields"),
        ("a.json", '[{"text": "a"}, {"text": null}]', "item 2: column"),
        ("a.csv", "note,n\none,1\n", "line 2: has no column"),
    ],
)
def test_places_of_other_files(name: str, content: str, where: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert said(str(tmp_path / name))[0].startswith(f"FILE, {where}")


def test_a_row_of_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b", None]}), path, row_group_size=2)
    assert said(str(path)) == ["FILE, rows 2, 4: column 'text' is empty (null)"]


@pytest.mark.parametrize(
    "value", [10**5000, -(10**400), 1e300, float("inf")], ids=["5000", "400", "300", "inf"]
)
@pytest.mark.parametrize("task", ["sst2", "stsb"])
def test_numbers_of_any_size_are_no_labels(value: float, task: str) -> None:
    check = check_of(DataSettings(path="a.jsonl", task=task))
    record = {"sentence": "one", "sentence1": "one", "sentence2": "two", "label": value}
    with pytest.raises(DataError, match=r"holds no (label|score)"):
        refuse_unusable([record], check)


def test_what_is_behind_the_limit_is_not_looked_at(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": ""}, {"text": None}, {"text": ""}, {"text": None})
    assert said(path, limit=3) == ["FILE, line 2: column 'text' is empty (null)"]
    refuse_unusable_files([path], "auto", 1, check_of(DataSettings(path=path)))


def test_records_in_memory() -> None:
    check = check_of(DataSettings(path="(in memory)"))
    with pytest.raises(DataError) as caught:
        refuse_unusable([{"text": SECRET}, {"text": None}, {"text": None}], check)
    assert caught.value.what == "records 2, 3: column 'text' is empty (null)"
    refuse_unusable([SECRET], check)


def run_of(tmp_path: Path, path: str | None, **groups: Any) -> Settings:
    privacy = {"noise_multiplier": 1, "delta": 1e-5, "expected_batch_size": 4, "public_dataset_size": 20}
    steps = {} if "federation" in groups else {"steps": 3}
    run = {"output": str(tmp_path / "run")}
    data = {**({} if path is None else {"path": path}), **groups.pop("data", {})}
    privacy |= steps
    content = {"model": {"name": "nobody"}, "data": data, "privacy": privacy, "run": run, **groups}
    return settings_from(content)


def refused(settings: Settings, *given: Any) -> list[str]:
    with pytest.raises(PrivloraError) as caught:
        load_all(settings, tiny_tokenizer(), *given)
    assert SECRET not in str(caught.value)
    return [one.what for one in caught.value.each()]


def test_every_file_is_looked_at_for_what_it_is_read_for(tmp_path: Path) -> None:
    """The private ones for their owner, too; texts of a file that writes, too."""
    private = lines(tmp_path / "a.jsonl", {"text": "x", "who": "a"}, {"text": "y", "who": None})
    public = lines(tmp_path / "b.jsonl", {"text": "u"}, {"text": None})
    written = lines(tmp_path / "c.jsonl", {"text": "v"}, {"story": "w"})
    settings = run_of(
        tmp_path,
        private,
        data={"evaluation": public},
        synthesis={"file": written},
        method={"name": "prism-span"},
    )
    privacy = settings.privacy.model_copy(update={"unit": "user", "user_column": "who"})
    assert refused(settings.model_copy(update={"privacy": privacy})) == [
        f"{private}, line 2: unit column 'who' names no unit: it is empty (null)",
        f"{public}, line 2: column 'text' is empty (null)",
        f"{written}, line 2: has no column 'text'; its columns are: story",
    ]


def test_the_records_of_a_client(tmp_path: Path) -> None:
    north = lines(tmp_path / "n.jsonl", {"text": "a"}, {"text": None})
    clients = [{"name": "north", "path": north}, {"name": "south", "path": None}]
    settings = run_of(tmp_path, None, federation={"clients": clients, "rounds": 2})
    given = records_of(settings, {"south": [{"text": "a"}, {"text": None}]})
    with pytest.raises(DataError) as caught:
        load_clients(settings, tiny_tokenizer(), given)
    assert caught.value.what == f"client north: {north}, line 2: column 'text' is empty (null)"


FAR = "the data hold {} as the 20 that group privacy says (public_dataset_size{})"


@pytest.mark.parametrize("count", [9, 10, 40, 41])
def test_far_more_units_or_fewer_than_the_public_number_are_refused(count: int, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": str(number)} for number in range(count)))
    for settings, given in (
        (run_of(tmp_path, path), ()),
        (run_of(tmp_path, "(in memory)"), ([{"text": "x"}] * count,)),
    ):
        if count in (10, 40):
            load_all(settings, tiny_tokenizer(), *given)
        else:
            much = "fewer than half as many records" if count == 9 else "more than twice as many records"
            assert refused(settings, *given) == [FAR.format(much, "")]
        load_all(run_of(tmp_path, path, data={"unchecked": True}), tiny_tokenizer())


def test_users_are_counted_and_not_told_from_one_another_where_some_are_numbers(tmp_path: Path) -> None:
    privacy = {"unit": "user", "user_column": "who"}

    def settings(*owners: object) -> Settings:
        path = lines(tmp_path / "a.jsonl", *({"text": "x", "who": owner} for owner in owners))
        found = run_of(tmp_path, path)
        return found.model_copy(update={"privacy": found.privacy.model_copy(update=privacy)})

    load_all(settings(*range(10), *range(10)), tiny_tokenizer())
    meant = "; with unit=user it counts users, not records"
    assert refused(settings(*range(9), *range(9))) == [FAR.format("fewer than half as many users", meant)]
    assert refused(settings(*range(10), "1")) == ["unit column 'who' mixes strings and integers"]
