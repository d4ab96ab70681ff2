"""Identities are kept where their owner alone reads them, and come from the operating system."""

import stat

import pytest

from privlora.errors import RunError
from privlora.federated.secure.keys import Identity, PublicIdentity


def test_an_identity_is_kept_for_its_owner_alone(tmp_path):
    path, identity = tmp_path / "identity", Identity.create()
    identity.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Identity.load(path)
    assert again.public("a") == identity.public("a")
    assert identity.public("a").signed(again.sign(b"x"), b"x")
    other = Identity.create().public("b").agreement
    assert again.agree(other) == identity.agree(other)
    with pytest.raises(RunError, match="cannot be written"):
        Identity.create().save(path)


def test_keys_that_others_may_read_are_refused(tmp_path):
    path = tmp_path / "identity"
    Identity.create().save(path)
    path.chmod(0o640)
    with pytest.raises(RunError, match="others may read"):
        Identity.load(path)


def test_damaged_and_missing_keys(tmp_path):
    with pytest.raises(RunError, match="cannot be read"):
        Identity.load(tmp_path / "none")
    (tmp_path / "short").write_bytes(bytes(63))
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(RunError, match="damaged"):
        Identity.load(tmp_path / "short")


def test_identities_differ_and_agree():
    one, two = Identity.create(), Identity.create()
    assert one.public("a").fingerprint != two.public("a").fingerprint
    assert one.public("a").fingerprint == one.public("b").fingerprint
    assert one.agree(two.public("b").agreement) == two.agree(one.public("a").agreement)
    assert not one.public("a").signed(two.sign(b"x"), b"x")
    assert not one.public("a").signed(one.sign(b"y"), b"x")
    assert not one.public("a").signed(b"short", b"x")


@pytest.mark.parametrize("name", ["", "a,b", "a/b", ".a", "a b", "a" * 65, "a\n"])
def test_names_that_cannot_be_listed(name):
    with pytest.raises(RunError, match="name"):
        PublicIdentity(name, bytes(32), bytes(32))


def test_keys_of_another_size():
    with pytest.raises(RunError, match="32 bytes"):
        PublicIdentity("a", bytes(31), bytes(32))
