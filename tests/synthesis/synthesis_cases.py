"""Generators and writers that a test can look into, and a server that speaks OpenAI's protocol."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StubGenerator:
    """Numbers its texts, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int | list[str]] = []

    def random(self, count: int) -> list[str]:
        self.asked.append(count)
        return [f"seed {i}" for i in range(count)]

    def vary(self, texts: Sequence[str]) -> list[str]:
        self.asked.append(list(texts))
        return [f"{text}, varied {i}" for i, text in enumerate(texts)]


class StubWriter:
    """Answers as ``answer`` says; keeps prompts and keys."""

    name = "stub"

    def __init__(self, answer: Callable[[Sequence[str]], Any], *, chat: bool = True) -> None:
        self.chat, self._answer = chat, answer
        self.asked: list[list[str]] = []
        self.keys: list[int] = []

    def write(self, prompts: Sequence[str], key: int) -> Any:
        self.asked.append(list(prompts))
        self.keys.append(key)
        return self._answer(prompts)


Answer = Callable[[dict[str, Any], int], tuple[int, bytes, dict[str, str]]]


@contextmanager
def served(answer: Answer) -> Iterator[tuple[str, list[tuple[str, dict[str, Any], dict[str, str]]]]]:
    """(address, requests as (path, body, headers)). answer: of a body and the request's number from 0: status, content,
    headers."""
    seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen.append((self.path, body, dict(self.headers)))
                number = len(seen) - 1
            status, content, headers = answer(body, number)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # the client gave up
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
