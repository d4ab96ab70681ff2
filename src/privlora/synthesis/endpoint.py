"""Texts from a server that speaks OpenAI's protocol, as vLLM, llama.cpp, Ollama and hosted models do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final

from privlora.errors import ConfigError, GeneratorError, in_one_line
from privlora.synthesis.writers import PATIENCE

if TYPE_CHECKING:
    import httpx

_KEY: Final = "PRIVLORA_API_KEY"
_AT_ONCE: Final = 8  # requests under way
_TRIES: Final = 5
_LONGEST_WAIT: Final = 60.0  # s, whatever a server asks for
_LARGEST: Final = 16 * 2**20  # bytes of an answer


class EndpointWriter:
    """Asks ``url/chat/completions``, or ``url/completions`` where prompts are gone on with; one request a prompt.

    What is sent: the prompt, the model's name, temperature, max_tokens and a seed that follows from the public
    one (servers that draw by it repeat themselves). Answers 429 and 5xx and broken connections are tried again, up to
    five times, after waits that double or that the server asks for.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        chat: bool = True,
        temperature: float = 1.0,
        max_new_tokens: int = 512,
        timeout: float = PATIENCE,
        backoff: float = 1.0,
    ) -> None:
        """timeout: seconds for one request. backoff: seconds before the second try. The key in the environment variable
        PRIVLORA_API_KEY is read here, if there is one, and never shown.

        Raises ConfigError if it is no key, or httpx is not installed.
        """
        try:
            import httpx
        except ImportError:
            raise ConfigError("synthesis.endpoint needs the package httpx", fix="pip install httpx") from None
        key = os.environ.get(_KEY)
        self.name, self.chat = f"endpoint (model {model})", chat
        self.told: Callable[[int], None] | None = None
        self._place = f"{url.rstrip('/')}/{'chat/completions' if chat else 'completions'}"
        self._body = {
            "model": model,
            "temperature": temperature,
            "max_tokens": max_new_tokens,
        }
        self._has_key, self._timeout, self._backoff = bool(key), timeout, backoff
        try:
            self._client = httpx.Client(
                headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=timeout
            )
        except ValueError:  # not chained: it holds the key
            raise ConfigError(
                f"the key in {_KEY} holds characters that no header may have",
                fix="set the variable to the key alone",
            ) from None

    def write(self, prompts: Sequence[str], key: int) -> list[str]:
        seeds = [(key + i) % 2**31 for i in range(len(prompts))]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = [pool.submit(self._answer, *asked) for asked in zip(prompts, seeds, strict=True)]
            try:
                found = []
                for answer in answers:
                    found.append(answer.result())
                    if self.told is not None:
                        self.told(len(found))
                return found
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # after a failure the rest is not asked for

    def _answer(self, prompt: str, seed: int) -> str:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {}
        content = self._sent({**self._body, **(asked or {"prompt": prompt}), "seed": seed})
        try:
            choice = json.loads(content)["choices"][0]
            text = choice["message"]["content"] if self.chat else choice["text"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise GeneratorError(
                "it answered with something else than a completion in JSON",
                fix="check that synthesis.endpoint ends where /chat/completions or /completions follows, often in /v1",
            ) from None
        return "" if text is None else text  # as chat models do that were cut off before the first word

    def _sent(self, body: dict[str, Any]) -> bytes:
        """The answer's bytes. Raises GeneratorError after the last try, or at once for what no try would mend."""
        import httpx

        problem = ""
        for attempt in range(_TRIES):
            asked_for: float | None = None
            try:
                status, content, asked_for = self._once(httpx, body)
            except (httpx.HTTPError, httpx.InvalidURL) as error:  # not chained: it may show headers
                said = f": {self._shown(str(error))}" if isinstance(error, httpx.ConnectError) else ""
                problem = f"the request failed ({type(error).__name__}{said})"
            else:
                if status < 300:
                    return content
                problem = f"it answered with status {status}"
                if status in (401, 403):
                    raise GeneratorError(
                        f"{problem}: it refused "
                        + (f"the key in {_KEY}" if self._has_key else "a request without a key"),
                        fix=f"export a valid key as {_KEY}",
                    )
                said = self._shown(_message(content))
                problem += f" and said “{said}”" if said else ""
                if status != 429 and status < 500:
                    raise GeneratorError(
                        problem, fix="check synthesis.endpoint, synthesis.endpoint_model and max_new_tokens"
                    )
            if attempt < _TRIES - 1:
                wait = self._backoff * 2**attempt if asked_for is None else asked_for
                sleep(min(wait, _LONGEST_WAIT))
        raise GeneratorError(
            f"{problem}, {_TRIES} times in a row",
            fix="see whether the server runs and answers in time",
        )

    def _shown(self, said: str) -> str:
        """What a server says of a request, which holds public texts alone; but the key that went with it is secret."""
        key = self._client.headers.get("Authorization", "").removeprefix("Bearer ")
        return in_one_line(said.replace(key, "(the key)") if key else said)

    def _once(self, http: Any, body: dict[str, Any]) -> tuple[int, bytes, float | None]:
        """(status, content, seconds to wait that the server asks for)."""
        end = monotonic() + self._timeout
        content = bytearray()
        with self._client.stream("POST", self._place, json=body) as response:
            for part in response.iter_bytes():
                content += part
                if monotonic() > end:  # httpx bounds the time between two parts alone
                    raise http.ReadTimeout("the answer trickles in")
                if len(content) > _LARGEST:
                    raise GeneratorError(
                        f"an answer is longer than {_LARGEST} bytes", fix="lower synthesis.max_new_tokens"
                    )
            return response.status_code, bytes(content), _seconds(response)


def _seconds(response: httpx.Response) -> float | None:
    """What Retry-After says, where it is a number of seconds."""
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None


def _message(content: bytes) -> str:
    """What an answer without a completion says, as servers of this protocol write it; of a page nothing."""
    text = content.decode(errors="replace")
    try:
        found = json.loads(text)
        for name in ("error", "message", "detail"):
            found = found.get(name, found) if isinstance(found, dict) else found
        return found if isinstance(found, str) else ""
    except (ValueError, RecursionError):
        return "" if text.lstrip()[:1] in ("<", "{", "[") else text
