"""A client's own files of one federation: its ledger, what it has answered, what it keeps. None of them leave it.

A fresh process may start for each message, so everything that must survive one lies here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from privlora.accounting import Ledger, Plan, read_ledger
from privlora.config import Settings, load_settings
from privlora.errors import PrivacyError, RunError
from privlora.federated.messages import KINDS, Request
from privlora.training.files import write_atomically


@dataclass(frozen=True)
class Desk:
    """FOLDER/RUN of one client. Only its owner can read it."""

    root: Path

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def _settings(self) -> Path:
        return self.root / "settings.yaml"

    @property
    def joined(self) -> bool:
        return self._settings.exists()

    @property
    def settings(self) -> Settings:
        """The public settings that this client has agreed to. Raises RunError before it has joined."""
        if not self.joined:
            raise RunError("asked to train before it joined", fix="join the federation first")
        return load_settings(self._settings)

    def open(self, settings: Settings, plan: Plan | None) -> None:
        """Join: the ledger first, so that whoever has joined has one. Joining again on the same terms changes nothing.

        Raises PrivacyError on other terms.
        """
        if self.joined:
            if self.settings != settings:
                raise PrivacyError(
                    "asked to join the same run on other terms",
                    why="its ledger states what was agreed to at first",
                    fix="start a new run for other settings",
                )
            return
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if plan is not None and not (self.ledger.exists() and b"\n" in self.ledger.read_bytes()):
            Ledger.create(self.ledger, plan).close()
        write_atomically(self._settings, settings.to_yaml())

    def begin(self, request: Request) -> None:
        """Note that ``request`` is being answered, before anything is done for it.

        Raises PrivacyError for one that came before, or that comes after a later one.
        """
        if self.left:
            raise PrivacyError(
                f"asked for {request.kind} after this federation was left",
                why="its ledger is closed, and budgets count no more than it shows",
                fix="start a new run",
            )
        stage = str(request.values.get("stage", request.kind))
        now = [request.round, 1 if stage == "sketch" else 0, KINDS.index(request.kind)]
        if now <= self._last():
            raise PrivacyError(
                f"asked again for {request.kind} of round {request.round}",
                why="two answers to one question could be taken apart, and would both be charged",
                fix="go on with the next round",
            )
        write_atomically(self._answered, json.dumps(now) + "\n")

    def _last(self) -> list[int]:
        if not self._answered.exists():
            return [0, 0, 0]
        try:
            number, stage, kind = json.loads(self._answered.read_text())
            return [int(number), int(stage), int(kind)]
        except (OSError, ValueError, TypeError) as error:
            raise PrivacyError(
                f"{str(self._answered)!r} is damaged ({type(error).__name__})",
                why="what this client has answered is not known any more",
                fix="restore it, or leave this federation",
            ) from None

    @property
    def _answered(self) -> Path:
        return self.root / "answered.json"

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Tensors for a later message."""
        write_atomically(
            self.root / f"{name}.safetensors", save({k: t.contiguous() for k, t in tensors.items()})
        )

    def kept(self, name: str) -> dict[str, Tensor]:
        """What was kept, or nothing."""
        path = self.root / f"{name}.safetensors"
        if not path.exists():
            return {}
        try:
            return load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"{str(path)!r} is damaged ({type(error).__name__})", fix="leave this federation"
            ) from None

    def keep_secret(self, name: str, content: bytes) -> None:
        """Keys of a secure sum that is under way; empty content removes them."""
        path = self.root / f"{name}.secret"
        if not content:
            path.unlink(missing_ok=True)
            return
        write_atomically(path, content)
        path.chmod(0o600)

    def secret(self, name: str) -> bytes | None:
        path = self.root / f"{name}.secret"
        return path.read_bytes() if path.exists() else None

    def keep_survivors(self, number: int, names: Sequence[str]) -> None:
        """Whom the secure sum of round ``number`` is over, for the round's next sum."""
        write_atomically(self.root / "survivors.json", json.dumps([number, *names]) + "\n")

    def survivors(self, number: int) -> list[str]:
        """Whom the last secure sum of this round was over; nobody, if there was none."""
        path = self.root / "survivors.json"
        kept = json.loads(path.read_text()) if path.exists() else [0]
        return [str(name) for name in kept[1:]] if kept[0] == number else []

    @property
    def left(self) -> bool:
        """Whether nothing more will be released here."""
        return (self.root / "left").exists()

    def leave(self) -> None:
        """The federation is over for this client."""
        write_atomically(self.root / "left", "")

    def statement(self) -> str:
        """The ledger as text, which is public; empty without one."""
        if not self.ledger.exists():
            return ""
        read_ledger(self.ledger)
        return self.ledger.read_text(encoding="utf-8")
