"""A signature of an annex: over the ledger's head and all files, by a key that is read and written nowhere."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from annex_cases import failed, said
from push_cases import BASE, Hub

from privlora.errors import ConfigError, PrivacyError, PrivloraError
from privlora.reporting import rewrite_report
from privlora.reporting.annex import annex_text, content_of
from privlora.reporting.annex_page import render_annex
from privlora.reporting.filing import file_annex
from privlora.reporting.pushing import push
from privlora.reporting.seals import sealed
from privlora.reporting.signing import fingerprint_of, is_signed_rightly, read_private_key, read_public_key
from privlora.reporting.verifying import verify
from privlora.training.files import RunFolder

pytest.importorskip("cryptography", reason="signs and verifies")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

PEM, RAW = serialization.Encoding.PEM, serialization.Encoding.Raw
PLAIN = serialization.NoEncryption()


pytestmark = pytest.mark.usefixtures("drawn")


def never() -> str:
    raise AssertionError("it was asked for a passphrase")


def written(path: Path, key: Any, passphrase: bytes | None = None, mode: int = 0o600) -> Path:
    locked = PLAIN if passphrase is None else serialization.BestAvailableEncryption(passphrase)
    path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, locked))
    path.chmod(mode)
    return path


@pytest.fixture(scope="module")
def key() -> Any:
    return ed25519.Ed25519PrivateKey.generate()


@pytest.fixture(scope="module")
def signed_run(filed: RunFolder, key: Any, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Tests must not change its folder."""
    folder = RunFolder(tmp_path_factory.mktemp("signed") / "run")
    shutil.copytree(filed.root, folder.root)
    file_annex(folder, key=key)
    return folder


@pytest.fixture
def release(signed_run: RunFolder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(signed_run.release, tmp_path / "handed-over"))


@pytest.mark.usefixtures("quick")
def test_what_was_signed_is_verified(release: Path, key: Any) -> None:
    public = key.public_key().public_bytes_raw().hex()
    found = verify(release, public_key=public)
    assert found.passed
    assert found.checks[-1].name == "signature"
    assert found.checks[-1].passed is True
    assert fingerprint_of(public) in (release / "annex.html").read_text()
    # without one it may be anybody's
    assert verify(release).checks[-1].passed is None
    other = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    assert failed(verify(release, public_key=other)) == ["signature"]


def test_the_message_is_head_and_hash(release: Path, key: Any) -> None:
    """By cryptography alone, as somebody would without this program."""
    annex = said(release)
    message = f"privlora annex 1\n{annex['ledger']['head']}\n{annex['sha256']}\n".encode()
    key.public_key().verify(bytes.fromhex(annex["signature"]["value"]), message)


def _resaid(release: Path, **signature: Any) -> None:
    annex = said(release)
    annex["signature"] |= signature
    (release / "annex.json").write_text(annex_text(annex))
    (release / "annex.html").write_text(render_annex(annex))


@pytest.mark.parametrize(
    "changed",
    [
        {"value": "0" * 128},
        {"public_key": "1" * 64},
        {"algorithm": "none"},
        {"value": "é"},
        {"note": "a patient"},
    ],
)
def test_no_part_of_a_signature_can_be_changed(changed: dict[str, str], release: Path) -> None:
    _resaid(release, **changed)
    assert failed(verify(release)) == ["signature"]


def test_a_signature_is_of_one_annex(release: Path) -> None:
    """Whoever makes the annex anew, hash and all, has no signature of it."""
    annex = said(release)
    annex["files"]["adapter_model.safetensors"] = "0" * 64
    content = {**sealed(content_of(annex)), "signature": annex["signature"]}
    (release / "annex.json").write_text(annex_text(content))
    assert not is_signed_rightly(content)
    assert set(failed(verify(release, public_key=annex["signature"]["public_key"]))) == {"annex", "signature"}


def test_an_unsigned_annex_does_not_pass_for_a_signed_one(filed: RunFolder, key: Any) -> None:
    found = verify(filed.release, public_key=key.public_key().public_bytes_raw().hex())
    assert failed(found) == ["signature"]


def test_a_signature_stays_while_the_annex_says_the_same(signed_run: RunFolder, tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(signed_run.root, tmp_path / "run")))
    before = said(run.release)
    rewrite_report(run)
    assert said(run.release) == before
    hub = Hub()
    push(run, "me/notes", base_model=BASE, api=hub)  # which renames the base
    assert "signature" not in json.loads(hub.files["annex.json"])
    _resaid(run.release, value="0" * 128)
    rewrite_report(run)
    assert "signature" not in said(run.release)


def test_the_private_key_is_written_nowhere(signed_run: RunFolder, key: Any) -> None:
    raw = key.private_bytes(RAW, serialization.PrivateFormat.Raw, PLAIN)
    pem = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, PLAIN).splitlines()[1]
    traces = (raw, raw.hex().encode(), base64.b64encode(raw), pem, b"PRIVATE KEY")
    for path in signed_run.root.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not [trace for trace in traces if trace in content], path


def test_keys_are_read_from_pem(tmp_path: Path, key: Any) -> None:
    public = key.public_key().public_bytes_raw().hex()
    found = read_private_key(written(tmp_path / "key.pem", key), never)
    assert found.public_key().public_bytes_raw().hex() == public
    # one with a passphrase may lie where others read
    locked = written(tmp_path / "locked.pem", key, b"secret", mode=0o644)
    assert read_private_key(locked, lambda: "secret").public_key().public_bytes_raw().hex() == public
    with pytest.raises(ConfigError, match="the passphrase does not open"):
        read_private_key(locked, lambda: "wrong")
    pem = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    for content in (pem, public.encode(), public.upper().encode() + b"\n"):
        (tmp_path / "public.pem").write_bytes(content)
        assert read_public_key(tmp_path / "public.pem") == public


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such modes")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o601])
def test_a_key_that_others_reach_is_refused(mode: int, tmp_path: Path, key: Any) -> None:
    path = written(tmp_path / "key.pem", key, mode=mode)
    with pytest.raises(PrivacyError, match=rf"others may read it \(mode {mode:o}\).* chmod 600") as raised:
        read_private_key(path, never)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_what_is_no_key_is_one_clear_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    for read in (lambda: read_private_key(path, never), lambda: read_public_key(path)):
        with pytest.raises(PrivloraError) as raised:
            read()
        assert "\n" not in str(raised.value)


def test_other_algorithms_and_places_are_refused(tmp_path: Path, key: Any) -> None:
    for other in (ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)):
        path = written(tmp_path / "other.pem", other)
        with pytest.raises(ConfigError, match=r"holds no private Ed25519 key in PEM.*openssl"):
            read_private_key(path, never)
        pem = other.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        path.write_bytes(pem)
        with pytest.raises(ConfigError, match=r"holds no public Ed25519 key in PEM.*openssl"):
            read_public_key(path)
        with pytest.raises(ConfigError, match="no private Ed25519 key in PEM"):
            read_private_key(path, never)
    path.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    with pytest.raises(ConfigError, match="SSH writes its keys in another form"):
        read_public_key(path)
    with pytest.raises(PrivacyError, match="holds a private key"):
        read_public_key(written(tmp_path / "key.pem", key))
    for path in (tmp_path, tmp_path / "nowhere"):
        for read in (
            lambda path=path: read_private_key(path, never),
            lambda path=path: read_public_key(path),
        ):
            with pytest.raises(ConfigError, match=r"cannot read the key|is no file"):
                read()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ConfigError, match="is no file"):
            read_public_key(tmp_path / "pipe")


def test_without_the_package_it_is_said_what_to_install(
    release: Path, tmp_path: Path, key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "key.pem", key)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for name in [name for name in sys.modules if name.startswith("cryptography.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"--sign needs the package cryptography. Fix: pip install"):
        read_private_key(path, never)
    assert failed(verify(release)) == ["signature"]
