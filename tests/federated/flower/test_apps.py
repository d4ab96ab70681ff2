"""What Flower starts: apps from configs, on both sides, and the folder that it takes them from."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
from flower_stubs import StubClient, expected, stub_serve
from flwr.app import Context, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.cli.flower_config import parse_superlink_connection

from privlora.errors import ConfigError, RunError
from privlora.federated.flower.app import toml_string, write_app
from privlora.federated.flower.client_app import REFUSED, Place, make_client_app
from privlora.federated.flower.grid import EmbeddedGrid
from privlora.federated.flower.records import message_type, read_reply, write_request
from privlora.federated.flower.server_app import Plan, make_server_app
from privlora.federated.messages import KINDS, Reply, Request


def node(tmp_path: Path, **changed: object) -> dict:
    config = {"name": "a", "folder": str(tmp_path / "a"), "data": "data-a", **changed}
    return {key: value for key, value in config.items() if value is not None}


def context(config: dict, run: dict | None = None) -> Context:
    return Context(run_id=1, node_id=2, node_config=config, state=RecordDict(), run_config=run or {})


def asked(request: Request) -> Message:
    metadata = Metadata(1, "id", 1, 2, "", str(request.round), 1e12, 60.0, message_type(request.kind))
    return Message(metadata=metadata, content=write_request(request))  # type: ignore[call-overload]


def ask(request: Request, config: dict, client=StubClient) -> Reply:
    return read_reply(make_client_app(client)(asked(request), context(config)))


def request(kind: str = "train", client: str = "a", **values: str) -> Request:
    return Request(client, kind, 1, {"x": torch.ones(2)}, values)


def test_every_kind_of_message_is_answered(tmp_path: Path) -> None:
    for k, kind in enumerate(KINDS, start=1):  # a new app each time: what survives is in the folder
        reply = ask(request(kind), node(tmp_path))
        assert (reply.client, reply.kind, reply.round, reply.refused) == ("a", kind, 1, None)
        assert int(reply.tensors["key"]) == len("data-a") + 2 * k


def test_a_node_gives_its_name_and_touches_nothing(tmp_path: Path) -> None:
    assert ask(Request("", "name", 0), node(tmp_path)) == Reply("a", "name", 0)
    assert not (tmp_path / "a").exists()


def test_a_request_for_somebody_else_is_refused(tmp_path: Path) -> None:
    assert ask(request(client="b"), node(tmp_path)).refused == "this client is called a"
    assert not (tmp_path / "a").exists()


def test_no_word_of_an_error_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    message = asked(request(fail="a"))
    reply = make_client_app(StubClient)(message, context(node(tmp_path)))
    assert read_reply(reply) == Reply("a", "train", 1, refused=REFUSED)
    assert "Alice" in capsys.readouterr().err  # of the client's own process


def test_a_request_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    message = asked(request())
    del message.content["values"]
    assert read_reply(make_client_app(StubClient)(message, context(node(tmp_path)))).refused == REFUSED


def test_a_reply_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    class Wide(StubClient):
        def answer(self, request: Request) -> Reply:
            return Reply("a", "train", 1, values={"k": 2**64})

    assert ask(request(), node(tmp_path), Wide).refused == REFUSED


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"name": None}, "lacks name"),
        ({"folder": None, "data": 3}, "lacks folder, data"),
        ({"folder": "here"}, "relative"),
        ({"name": "a b"}, "no public name"),
        ({"name": ""}, "no public name"),
    ],
)
def test_node_configs(tmp_path: Path, changed: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Place.read(node(tmp_path, **changed))


def test_in_a_simulation_places_go_by_number(tmp_path: Path) -> None:
    places = [Place(name, tmp_path / name, f"data-{name}") for name in "ab"]
    app = make_client_app(StubClient, places)
    assert (
        read_reply(app(asked(request(client="b")), context({"partition-id": 1, "num-partitions": 2}))).client
        == "b"
    )


def test_a_server_app_from_the_run_config(tmp_path: Path) -> None:
    clients = {name: StubClient(tmp_path / name, f"data-{name}") for name in "abc"}
    grid = EmbeddedGrid("abc", lambda requests: [clients[r.client].answer(r) for r in requests])
    config = {"settings": "rounds: 2", "output": str(tmp_path / "out"), "timeout": 5, "clients": "c, a,b"}
    make_server_app(stub_serve)(grid, context({}, config))
    assert (tmp_path / "out/result.txt").read_text() == expected("abc", rounds=2)


def test_nobody_named_means_whoever_comes(tmp_path: Path) -> None:
    config = {"settings": "{}", "output": str(tmp_path), "timeout": 1.5, "clients": " "}
    assert Plan.read(config) == Plan({}, tmp_path, 1.5, None)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"settings": None}, "no text 'settings'"),
        ({"settings": "- 1"}, "name no settings"),
        ({"settings": "a: ["}, "neither JSON nor YAML"),
        ({"output": "out"}, "relative"),
        ({"timeout": 0}, "no number of seconds"),
        ({"timeout": float("nan")}, "no number of seconds"),
        ({"timeout": True}, "no number of seconds"),
        ({"timeout": None}, "no number of seconds"),
        ({"clients": 3}, "no text 'clients'"),
    ],
)
def test_run_configs(tmp_path: Path, changed: dict, says: str) -> None:
    config = {"settings": "{}", "output": str(tmp_path), "timeout": 5.0, "clients": "", **changed}
    with pytest.raises(ConfigError, match=says):
        Plan.read({key: value for key, value in config.items() if value is not None})


SETTINGS = {
    "rounds": 2,
    "delta": 1e-05,
    "smile": "\U0001f600",
    "note": 'of "quotes", \\ and ümlauts \x7f\n',
    "rule": {"rank": 4, "warm": True},
}


def test_what_is_written_is_what_flower_reads(tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app-1", SETTINGS, output=tmp_path / "out", clients=["a", "b"], timeout=60)
    config, warnings = load_and_validate(folder / "pyproject.toml")
    assert warnings == []
    plan = Plan.read(config["tool"]["flwr"]["app"]["config"])
    assert plan == Plan(SETTINGS, tmp_path / "out", 60.0, ("a", "b"))
    connection = tomllib.loads((folder / "flower-home/config.toml").read_text())["superlink"]
    link = parse_superlink_connection(connection[connection["default"]], "federation")
    assert (link.address, link.insecure, link.root_certificates) == ("127.0.0.1:8000", True, None)
    for module in ("server_app", "client_app"):
        compile((folder / f"privlora_app/{module}.py").read_text(), module, "exec")


def test_what_flower_sends_to_clients(tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", SETTINGS, output=tmp_path / "out", clients=["a", "b"])
    (folder / "flower-home/secret.json").write_text("{}")  # Flower keeps its own files there
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(folder))) as bundle:
        names = {name for name in bundle.namelist() if not name.startswith(".info")}
    modules = {f"privlora_app/{name}.py" for name in ("__init__", "client_app", "server_app")}
    assert names == modules | {"pyproject.toml", "README.md"}


def test_with_tls_nothing_is_insecure(tmp_path: Path) -> None:
    authority = tmp_path / "ca.crt"
    folder = write_app(
        tmp_path / "app",
        {},
        output="out",
        clients=["a"],
        superlink="link.example:9000",
        root_certificates=authority,
    )
    connection = tomllib.loads((folder / "flower-home/config.toml").read_text())["superlink"]["federation"]
    assert connection == {"address": "link.example:9000", "root-certificates": str(authority)}
    readme = (folder / "README.md").read_text()
    assert "insecure" not in readme
    assert "--port 9000" in readme
    assert Path(
        tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]["output"]
    ).is_absolute()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    assert write_app(tmp_path / "app", {}, output="o", clients=[]).is_dir()  # an empty one may be filled
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match="there already"):
        write_app(tmp_path / "app", {}, output="o", clients=[])
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="there already"):
        write_app(tmp_path / "file", {}, output="o", clients=[])
    with pytest.raises(RunError, match="cannot write"):
        write_app(tmp_path / "file/app", {}, output="o", clients=[])
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "file"])


def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(path: Path, text: str, **kwargs: object) -> int:
        if path.name == "client_app.py":
            raise OSError(28, "No space left on device")
        return write(path, text, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match="No space left"):
        write_app(tmp_path / "app", {}, output="o", clients=[])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["App", "1app", "my_app", "a b"])
def test_names_that_flower_would_not_take(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a Flower app"):
        write_app(tmp_path / name, {}, output="o", clients=[])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"clients": ["a,b"]}, "no public name"),
        ({"superlink": "link.example"}, "has no port"),
        ({"timeout": -1.0}, "no number of seconds"),
        ({"timeout": float("inf")}, "no number of seconds"),
    ],
)
def test_apps_that_could_not_start_are_not_written(tmp_path: Path, changed: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        write_app(tmp_path / "app", {}, **{"output": "o", "clients": ["a"], **changed})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [{"rate": float("nan")}, {"rate": object()}])
def test_settings_that_cannot_be_written(tmp_path: Path, settings: dict) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_app(tmp_path / "app", settings, output="o", clients=[])
    assert list(tmp_path.iterdir()) == []


def test_texts_of_toml() -> None:
    text = "".join(map(chr, range(1, 256))) + "\U0001f600"
    assert tomllib.loads(f"x = {toml_string(text)}")["x"] == text


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_without_flwr_the_rest_works_and_says_what_to_install() -> None:
    hide = "import sys; sys.modules['flwr'] = None; import importlib.util as u; find = u.find_spec\n"
    hide += "u.find_spec = lambda name, *a: None if name == 'flwr' else find(name, *a)\n"
    code = (
        hide
        + "import privlora.federated\ntry:\n import privlora.federated.flower\n"
        + "except Exception as e: print(type(e).__name__, e)"
    )
    assert run(code).startswith("ConfigError federated training over Flower needs the package flwr")
    assert "pip install 'privlora[federated]'" in run(code)
    assert run("import sys, privlora.federated; print('flwr' in sys.modules)") == "False\n"


def test_flower_calls_nobody() -> None:
    code = "import os; {}; import privlora.federated.flower.grid\n"
    code += "from flwr.supercore import telemetry; print(telemetry.FLWR_TELEMETRY_ENABLED)"
    assert run(code.format("os.environ.pop('FLWR_TELEMETRY_ENABLED', None)")) == "0\n"
    assert run(code.format("os.environ['FLWR_TELEMETRY_ENABLED'] = '1'")) == "1\n"  # whoever wants it has it
