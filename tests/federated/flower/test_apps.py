"""What Flower starts: apps from configs, on both sides, and the folder that it takes them from."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
from flower_core import federation
from flower_stubs import EmbeddedGrid, StubClient
from flwr.app import Context, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.cli.flower_config import parse_superlink_connection
from flwr.common.config import parse_config_args

from privlora.config import Settings
from privlora.errors import ConfigError, ModelError, RunError
from privlora.federated.client import Client
from privlora.federated.flower.app import _TEMPLATES, write_app
from privlora.federated.flower.client_app import client_of, make_client_app
from privlora.federated.flower.records import message_type, packed, read_reply
from privlora.federated.flower.server_app import APPS, Plan, make_server_app, told_to_clients
from privlora.federated.limits import Limits
from privlora.federated.messages import BAD_CONFIG, KINDS, OTHER_NAME, REFUSED, Reply, Request


def node(tmp_path: Path, **changed: object) -> dict:
    config = {"name": "a", "folder": str(tmp_path / "a"), "data": "data-a", **changed}
    return {key: value for key, value in config.items() if value is not None}


def context(config: dict, run: dict | None = None) -> Context:
    return Context(run_id=1, node_id=2, node_config=config, state=RecordDict(), run_config=run or {})


def asked(request: Request) -> Message:
    metadata = Metadata(1, "id", 1, 2, "", str(request.round), 1e12, 60.0, message_type(request.kind))
    return Message(metadata=metadata, content=packed(request))  # type: ignore[call-overload]


def stub(place: Client) -> StubClient:
    return StubClient(place.folder, str(place.path))


def ask(request: Request, config: dict, client=stub) -> Reply:
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


def test_a_request_for_somebody_else_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ask(request(client="b"), node(tmp_path)) == Reply("a", "train", 1, refused=OTHER_NAME)
    assert not (tmp_path / "a").exists()
    assert "the server calls it 'b', and its node config says name='a'" in caplog.text
    assert {record.levelname for record in caplog.records} == {"ERROR"}


def test_no_word_of_an_error_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    message = asked(request(fail="a"))
    reply = make_client_app(stub)(message, context(node(tmp_path)))
    assert read_reply(reply) == Reply("a", "train", 1, refused=REFUSED)
    assert "Alice" in capsys.readouterr().err  # of the client's own process


def test_a_reply_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    class Wide(StubClient):
        def answer(self, request: Request) -> Reply:
            return Reply("a", "train", 1, values={"k": 2**64})

    assert ask(request(), node(tmp_path), lambda place: Wide(place.folder, "")).refused == REFUSED


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"name": None}, "name: Field required"),
        ({"folder": None, "data": 3}, "folder: Field required; data: Input should be a valid string"),
        ({"folder": "here"}, "relative"),
        ({"name": "a b"}, "name: String should match"),
        ({"max_epsilom": 1.0}, "'max_epsilom': Extra inputs are not permitted"),
        ({"patient Jane has HIV": 1}, "not shown.*: Extra inputs are not permitted"),
        ({"max_epsilon": "1"}, "max_epsilon: Input should be a valid number"),
        ({"max_epsilon": True}, "max_epsilon: Input should be a valid number"),
        ({"max_delta": float("nan")}, "max_delta: not a number"),
        ({"must_be_private": 0}, "must_be_private: Input should be a valid boolean"),
        ({"unit": "patient"}, "unit: Input should be"),
        ({"format": "lines"}, "format: Input should be 'auto'"),
        ({"pins": "/nowhere.json"}, "pins in the node config cannot be read"),
        ({"pins": __file__}, "pins in the node config cannot be read"),
    ],
)
def test_node_configs(
    tmp_path: Path, changed: dict, says: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    config = node(tmp_path, **changed)
    with pytest.raises(ConfigError, match=says):
        client_of(config)
    # Flower would send the server what an exception says.
    reply = read_reply(make_client_app(stub)(asked(request()), context(config)))
    assert reply == Reply("", "train", 1, refused=BAD_CONFIG)
    said = {record.getMessage() for record in caplog.records if record.levelname == "ERROR"}
    assert len(said) == 1  # by Flower's logger too, which a SuperNode shows
    assert re.search(says, said.pop())
    assert {record.name.split(".")[0] for record in caplog.records} == {"privlora", "flwr"}
    assert "Traceback" not in capsys.readouterr().err


def test_what_an_owner_sets(tmp_path: Path) -> None:
    pins = tmp_path / "pins.json"
    pins.write_text('{"b": "00ff"}')
    given = f'name="a" folder="{tmp_path}/a" data="data-a" format="jsonl" model="/model" revision="v2" pins="{pins}"'
    config = parse_config_args(  # of --node-config
        [f"{given} max_epsilon=2 pins_model=false least_clients=3"]
    )
    client = client_of(config)
    limits = Limits(max_epsilon=2, pins_model=False, least_clients=3)
    of_file = (client.name, client.folder, client.path, client.format)
    assert of_file == ("a", tmp_path / "a", "data-a", "jsonl")
    of_model = (client.model, client.revision, client.pins, client.limits)
    assert of_model == ("/model", "v2", {"b": "00ff"}, limits)


def test_messages_of_several_runs_take_turns(tmp_path: Path) -> None:
    def make(place: Client) -> StubClient:
        with open(place.folder / "turn.lock", "wb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stub(place)

    for _ in range(2):
        assert ask(request(), node(tmp_path), make).refused is None


def test_in_a_simulation_places_go_by_number(tmp_path: Path) -> None:
    places = [Client(name, tmp_path / name, f"data-{name}") for name in "ab"]
    app = make_client_app(stub, places)
    assert (
        read_reply(app(asked(request(client="b")), context({"partition-id": 1, "num-partitions": 2}))).client
        == "b"
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return federation(tmp_path, tmp_path / "out", "tan", weights=[1.0, 2.0, 3.0])


def write(tmp_path: Path, settings: Settings, **more: object) -> Path:
    return write_app(tmp_path / "apps/app-1", settings, **more)  # type: ignore[arg-type]


def read_config(folder: Path) -> dict:
    config, warnings = load_and_validate(folder / "pyproject.toml")
    assert warnings == []
    return dict(config["tool"]["flwr"]["app"]["config"])


def test_a_server_app_goes_by_its_own_settings(tmp_path: Path, settings: Settings, monkeypatch) -> None:
    config = read_config(write(tmp_path, settings, timeout=5))
    monkeypatch.setenv(APPS, str(tmp_path / "apps"))
    seen: list = []
    grid = EmbeddedGrid("abcd", lambda requests: [])
    make_server_app(lambda *given: seen.append(given))(grid, context({}, config))
    ((given, exchange, folder),) = seen
    assert (exchange.names(), exchange.timeout, folder) == (["a", "b", "c"], 5.0, tmp_path / "out")
    assert given.model.name == settings.model.name
    assert told_to_clients(given) == told_to_clients(settings)


def test_what_is_written_is_what_flower_reads(tmp_path: Path, settings: Settings) -> None:
    note = 'of "quotes", \\ and ümlauts \U0001f600'
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"label": note})})
    folder = write(tmp_path, settings, timeout=60)
    plan = Plan.read(read_config(folder), {APPS: str(tmp_path / "apps")})
    assert (plan.timeout, plan.settings.run.label) == (60.0, note)
    assert [client.path for client in plan.settings.federation.clients] == [None] * 3
    connection = tomllib.loads((folder / "flower-home/config.toml").read_text())["superlink"]
    link = parse_superlink_connection(connection[connection["default"]], "federation")
    assert (link.address, link.insecure, link.root_certificates) == ("127.0.0.1:8000", True, None)
    for module in ("server_app", "client_app"):
        compile((folder / f"privlora_app/{module}.py").read_text(), module, "exec")


def test_what_flower_sends_to_clients(tmp_path: Path, settings: Settings) -> None:
    """No path of the server's machine is in it."""
    evaluation = tmp_path / "evaluation.jsonl"
    evaluation.write_text('{"text": "public"}\n')
    data = settings.data.model_copy(update={"evaluation": str(evaluation)})
    (tmp_path / "ca.crt").touch()
    folder = write(
        tmp_path, settings.model_copy(update={"data": data}), root_certificates=tmp_path / "ca.crt"
    )
    (folder / "flower-home/secret.json").write_text("{}")  # Flower keeps its own files there
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(folder))) as bundle:
        names = {name for name in bundle.namelist() if not name.startswith(".info")}
        sent = b"".join(bundle.read(name) for name in bundle.namelist())
    modules = {f"privlora_app/{name}.py" for name in ("__init__", "client_app", "server_app")}
    assert names == modules | {"pyproject.toml"}
    for private in (tmp_path, Path(settings.model.name).parent, Path(sys.prefix)):
        assert str(private).encode() not in sent
        assert str(private) not in repr(read_config(folder))
    own = Plan.read(read_config(folder), {APPS: str(tmp_path / "apps")}).settings
    assert own.data.evaluation == str(evaluation)
    assert (folder / "server").stat().st_mode & 0o077 == 0


def test_with_tls_nothing_is_insecure(tmp_path: Path, settings: Settings) -> None:
    authority = tmp_path / "ca.crt"
    authority.touch()
    folder = write(tmp_path, settings, superlink="link.example:9000", root_certificates=authority)
    connection = tomllib.loads((folder / "flower-home/config.toml").read_text())["superlink"]["federation"]
    assert connection == {"address": "link.example:9000", "root-certificates": str(authority)}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"settings": None}, "no text 'settings'"),
        ({"settings": "a: ["}, "do not follow from"),
        ({"settings": "run: {seed: 1}"}, "the run config do not follow from"),
        ({"app": None}, "no text 'app'"),
        ({"app": "../app-1"}, "cannot name an app"),
        ({"app": "app-2"}, "has no server/settings.yaml"),
        ({"timeout": 0}, "no time in seconds"),
        ({"timeout": None}, "no time in seconds"),
    ],
)
def test_run_configs(tmp_path: Path, settings: Settings, changed: dict, says: str) -> None:
    config = {**read_config(write(tmp_path, settings)), **changed}
    with pytest.raises(ConfigError, match=says):
        Plan.read(
            {key: value for key, value in config.items() if value is not None}, {APPS: str(tmp_path / "apps")}
        )


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "app").mkdir()
    assert write_app(tmp_path / "app", settings).is_dir()  # an empty one may be filled
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match="there already"):
        write_app(tmp_path / "app", settings)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="there already"):
        write_app(tmp_path / "file", settings)
    with pytest.raises(RunError, match="cannot write"):
        write_app(tmp_path / "file/app", settings)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "file"])


def test_nothing_is_half_written(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text, before = Path.write_text, sorted(tmp_path.iterdir())

    def full(path: Path, text: str, **kwargs: object) -> int:
        if path.name == "client_app.py":
            raise OSError(28, "No space left on device")
        return write_text(path, text, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match="No space left"):
        write_app(tmp_path / "app", settings)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "group", "changed", "kind"),
    [
        *((name, "", {}, ConfigError) for name in ("App", "1app", "my_app", "a b")),
        ("app-1", "", {"superlink": "link.example"}, ConfigError),
        ("app-1", "", {"root_certificates": "nowhere.crt"}, ConfigError),
        ("app-1", "", {"timeout": float("inf")}, ConfigError),
        *(("app-1", "model", {"name": name}, ModelError) for name in ("/nowhere/model", "./model", "a/b/c")),
        ("app-1", "federation", None, ConfigError),
    ],
)
def test_apps_that_could_not_start_are_not_written(
    tmp_path: Path, settings: Settings, name: str, group: str, changed: Any, kind: type[Exception]
) -> None:
    options = {} if group else changed
    if group:
        own = changed and getattr(settings, group).model_copy(update=changed)
        settings = settings.model_copy(update={group: own})
    with pytest.raises(kind):
        write_app(tmp_path / "apps" / name, settings, **options)
    assert not (tmp_path / "apps").exists()


GUIDE = Path(__file__).parents[3] / "docs/federated-deployment.md"


def commands(text: str) -> list[str]:
    """Lines of the indented blocks; what goes on in the next line is one command."""
    blocks = [line[4:] if line.startswith("    ") else "" for line in text.splitlines()]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


@pytest.mark.parametrize("authority", [None, "ca.crt"])
def test_each_command_of_the_written_readme_is_one_of_the_guide(authority: str | None) -> None:
    """Filled in with the guide's own examples it is the same, word for word; and so it is in its order."""
    values = {
        "name": "clinics",
        "folder": "/srv/federation/clinics",
        "apps": "/srv/federation",
        "clients": ["clinic-a"],
        "superlink": "127.0.0.1:9391" if authority is None else "link.example:9391",
        "authority": authority,
        "output": "/srv/runs/clinics",
    }
    written = commands(_TEMPLATES.get_template("README.md.j2").render(values))
    guide = commands(GUIDE.read_text(encoding="utf-8"))
    assert [line for line in written if line not in guide] == []
    if authority is not None:
        assert not any("0.0.0.0" in line or "--insecure" in line for line in written)


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_without_flwr_the_rest_works_and_says_what_to_install() -> None:
    code = """
import importlib.util, sys
import privlora.federated
assert "flwr" not in sys.modules
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "flwr" else find(name, *rest)
sys.modules["flwr"] = None
try:
    import privlora.federated.flower
except Exception as error:
    print(type(error).__name__, error)
"""
    said = run(code)
    assert said.startswith("ConfigError")
    assert "pip install 'privlora[federated]'" in said


def test_flower_calls_nobody() -> None:
    code = "import os; {}; import privlora.federated.flower.grid\n"
    code += "from flwr.supercore import telemetry; print(telemetry.FLWR_TELEMETRY_ENABLED)"
    assert run(code.format("os.environ.pop('FLWR_TELEMETRY_ENABLED', None)")) == "0\n"
    assert run(code.format("os.environ['FLWR_TELEMETRY_ENABLED'] = '1'")) == "1\n"  # whoever wants it has it
