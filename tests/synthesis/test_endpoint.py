"""The endpoint against a server of our own: what is sent, what is tried again, and what errors keep to themselves."""

from __future__ import annotations

import json
import logging
import socket
import threading
from typing import Any

import pytest
from synthesis_cases import served

from privlora.config.synthesis import SynthesisSettings
from privlora.errors import ConfigError, GeneratorError
from privlora.synthesis.endpoint import EndpointWriter
from privlora.synthesis.generators import build_generator

KEY = "sk-very-secret-4711"
MODEL = "tiny"


def completion(text: Any, *, chat: bool = True) -> bytes:
    choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return json.dumps({"choices": [choice]}).encode()


def writer(url: str, **how: Any) -> EndpointWriter:
    return EndpointWriter(url, MODEL, backoff=0.0, **how)


def test_a_chat_is_asked_each_prompt_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVLORA_API_KEY", KEY)
    with served(lambda body, _: (200, completion(body["messages"][0]["content"].upper()), {})) as (url, seen):
        settings = SynthesisSettings(
            endpoint=url + "/",
            endpoint_model=MODEL,
            random_prompt="a note",
            variation_prompt="like {text}",
            temperature=0.5,
            max_new_tokens=17,
        )
        generator = build_generator(settings, seed=4)
        assert generator.random(2) == ["A NOTE"] * 2
        texts = [f"text {i}" for i in range(20)]
        assert generator.vary(texts) == [f"LIKE TEXT {i}" for i in range(20)]
    for path, body, headers in seen:
        assert path == "/v1/chat/completions"
        assert headers["Authorization"] == f"Bearer {KEY}"
        assert {k: v for k, v in body.items() if k not in ("messages", "seed")} == {
            "model": MODEL,
            "temperature": 0.5,
            "max_tokens": 17,
        }
        assert [turn["role"] for turn in body["messages"]] == ["user"]
    seeds = {body["seed"] for _, body, _ in seen}
    assert len(seeds) == len(seen) == 22
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_public_seed_is_sent() -> None:
    with served(lambda body, _: (200, completion(str(body["seed"])), {})) as (url, _):
        settings = SynthesisSettings(endpoint=url, endpoint_model=MODEL)
        first, again, other = (build_generator(settings, seed=seed).random(3) for seed in (1, 1, 2))
    assert first == again
    assert not set(first) & set(other)


def test_beginnings_are_gone_on_with() -> None:
    with served(lambda body, _: (200, completion(" and more", chat=False), {})) as (url, seen):
        settings = SynthesisSettings(endpoint=url, endpoint_model=MODEL, chat=False, preset="clinical-note")
        assert build_generator(settings, seed=0).vary(["one two three"]) == ["one and more"]
    ((path, body, headers),) = seen
    assert (path, body["prompt"]) == ("/v1/completions", "Clinical note:\n\none")
    assert "Authorization" not in headers
    assert "messages" not in body


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(status: int) -> None:
    def answer(body: Any, number: int) -> tuple[int, bytes, dict[str, str]]:
        return (200, completion("done"), {}) if number == 3 else (status, b"busy", {"Retry-After": "0"})

    with served(answer) as (url, seen):
        assert writer(url).write(["a"], 0) == ["done"]
    assert [body for _, body, _ in seen] == [seen[0][1]] * 4


def test_waits_double_and_follow_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("privlora.synthesis.endpoint.sleep", waits.append)
    headers = [
        {},
        {"Retry-After": "7"},
        {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"},
        {"Retry-After": "1e9"},
    ]
    with (
        served(lambda _, n: (503, b"", headers[n] if n < 4 else {})) as (url, seen),
        pytest.raises(GeneratorError, match="status 503, 5 times in a row"),
    ):
        EndpointWriter(url, MODEL, backoff=1.0).write(["a"], 0)
    assert waits == [1.0, 7.0, 4.0, 60.0]
    assert len(seen) == 5


@pytest.mark.parametrize("status", [400, 404, 307])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", ""),
        (b"<html>not found</html>", ""),
        (b"no such\n  model\x1b[31m", " and said “no such model [31m”"),
        (b'{"error": {"message": "no such model", "type": "x"}}', " and said “no such model”"),
        (b'{"error": "no such model"}', " and said “no such model”"),
        (b'{"detail": "no such model"}', " and said “no such model”"),
        (b'{"detail": [{"loc": 1}]}', ""),
        (b"[" * 10**5, ""),
        (b"\xff" + b"a" * 10**5, f" and said “\N{REPLACEMENT CHARACTER}{'a' * 199}…”"),
    ],
)
def test_what_no_try_would_mend_is_not_tried_again_and_the_server_is_quoted(
    status: int, content: bytes, said: str
) -> None:
    with (
        served(lambda *_: (status, content, {})) as (url, seen),
        pytest.raises(GeneratorError) as refused,
    ):
        writer(url).write(["a"], 0)
    assert len(seen) == 1
    assert f"it answered with status {status}{said}. Fix: check" in str(refused.value)


@pytest.mark.parametrize("status", [400, 429, 503])
@pytest.mark.parametrize("content", [f"not with {KEY}", json.dumps({"error": f"{'a' * 190}{KEY}"})])
def test_a_key_that_a_server_quotes_is_not_shown(
    status: int, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVLORA_API_KEY", KEY)
    with (
        served(lambda *_: (status, content.encode(), {})) as (url, _),
        pytest.raises(GeneratorError, match=f"status {status} and said") as refused,
    ):
        writer(url).write(["a"], 0)
    assert "(the k" in str(refused.value)
    assert KEY[:8] not in str(refused.value)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_not_shown(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PRIVLORA_API_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    with (
        served(lambda *_: (status, f"Incorrect API key: {KEY}".encode(), {})) as (url, _),
        pytest.raises(GeneratorError, match="refused the key in PRIVLORA_API_KEY") as refused,
    ):
        writer(url).write(["a"], 0)
    assert KEY not in str(refused.value)
    assert KEY not in caplog.text
    assert KEY not in repr(vars(writer(url)))


def test_a_key_that_is_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVLORA_API_KEY", KEY + "é")
    with pytest.raises(ConfigError, match="no header") as refused:
        EndpointWriter("http://127.0.0.1:1/v1", MODEL)
    assert KEY not in str(refused.value)
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"[]",
        b'"text"',
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"text": "a"}]}',
        b'{"choices": [{"message": "a"}]}',
        b'{"choices": [{"message": {"content": "\xff"}}]}',
        b"[" * 10**5,
    ],
)
def test_what_is_no_completion_is_refused(content: bytes) -> None:
    with (
        served(lambda *_: (200, content, {})) as (url, _),
        pytest.raises(GeneratorError, match="something else than a completion"),
    ):
        writer(url).write(["a"], 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [(5, "type int"), ("\ud800", "UTF-8"), ([{"type": "text"}], "type list"), (None, "are empty")],
)
def test_answers_that_are_no_texts_name_the_call(content: Any, words: str) -> None:
    with served(lambda *_: (200, completion(content), {})) as (url, _):
        settings = SynthesisSettings(endpoint=url, endpoint_model=MODEL)
        with pytest.raises(GeneratorError, match=words) as refused:
            build_generator(settings, seed=0).random(1)
    assert "endpoint (model tiny), call 1 (random, 1 texts)" in str(refused.value)


def test_a_server_that_hangs_is_given_up() -> None:
    wakes = threading.Event()

    def answer(*_: Any) -> tuple[int, bytes, dict[str, str]]:
        wakes.wait(60)
        return 200, completion("late"), {}

    with served(answer) as (url, _):
        with pytest.raises(GeneratorError, match=r"Timeout.*5 times in a row"):
            writer(url, timeout=0.05).write(["a"], 0)
        wakes.set()


def test_an_answer_that_trickles_in_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 400))  # each look at the clock is 400 s after the one before
    monkeypatch.setattr("privlora.synthesis.endpoint.monotonic", lambda: next(clock))
    with (
        served(lambda *_: (200, completion("done"), {})) as (url, _),
        pytest.raises(GeneratorError, match="ReadTimeout"),
    ):
        writer(url, timeout=300.0).write(["a"], 0)


def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privlora.synthesis.endpoint._LARGEST", 1000)
    with (
        served(lambda *_: (200, completion("a" * 2000), {})) as (url, _),
        pytest.raises(GeneratorError, match="longer than 1000 bytes"),
    ):
        writer(url).write(["a"], 0)


def test_a_place_where_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(GeneratorError, match="ConnectError"):
            writer(url).write(["a"] * 3, 0)


def test_httpx_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "httpx", None)
    with pytest.raises(ConfigError, match="pip install httpx"):
        EndpointWriter("http://127.0.0.1:1/v1", MODEL)
