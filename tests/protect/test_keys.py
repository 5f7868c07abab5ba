from __future__ import annotations

import os
import stat
from pathlib import Path

import pyrage
import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.protect.sealed.age_streams import parse_recipient, parse_recipients
from wgpu_lora.protect.sealed.keys import DataKey, PublicKey, SessionKeys, SigningKey, write_private


def test_a_data_key_survives_its_file_and_is_gone_after_wiping(tmp_path: Path) -> None:
    key = DataKey.generate()
    write_private(tmp_path / "data.key", key.file_text())
    assert DataKey.read(tmp_path / "data.key").text() == key.text()
    assert DataKey.parse(key.text().lower()).recipient == key.recipient  # Bech32 has one case or the other
    if os.name != "nt":
        assert stat.S_IMODE((tmp_path / "data.key").stat().st_mode) == 0o600
    key.wipe()
    key.wipe()
    for use in (key.identity, key.text, key.file_text):
        with pytest.raises(ValueError, match="wiped"):
            use()


def test_keys_never_show_themselves() -> None:
    keys = SessionKeys.generate()
    assert keys.data.text().decode() not in repr(keys)
    assert "PRIVATE" not in repr(keys)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# only\n",
        b"age1xyz\n",
        b"AGE-SECRET-KEY-1QQQQ\n",
        b"\xff\xfe\x00",
        b"\0" * 100,
        "two",
        "cut",
        b"x" * 70_000,
    ],
)
def test_a_file_that_holds_no_single_identity_is_refused_without_showing_it(
    tmp_path: Path, content: str | bytes
) -> None:
    text = DataKey.generate().text()
    if content == "two":
        content = text + b"\n" + text
    elif content == "cut":
        content = text[:-1]
    assert isinstance(content, bytes)
    (tmp_path / "data.key").write_bytes(content)
    with pytest.raises(UserError, match=r"data\.key") as caught:
        DataKey.read(tmp_path / "data.key")
    assert text.decode()[20:40] not in str(caught.value)


def test_signing_keys_sign_and_their_public_halves_verify(tmp_path: Path) -> None:
    key = SigningKey.generate()
    write_private(tmp_path / "broker.pem", key.private_pem())
    (tmp_path / "broker.pem.pub").write_text(key.public.pem.replace("\n", "\r\n"))
    again, public = SigningKey.read(tmp_path / "broker.pem"), PublicKey.read(tmp_path / "broker.pem.pub")
    assert again.public == key.public == public
    public.ssl_key().verify_signature(again.signer.sign(b"said"), b"said")
    with pytest.raises(Exception, match=r"[Vv]erif|[Ss]ignature"):
        public.ssl_key().verify_signature(again.signer.sign(b"said"), b"not said")
    key.wipe()
    with pytest.raises(ValueError, match="wiped"):
        key.signer  # noqa: B018


def test_other_keys_are_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    pem, pkcs8, nothing = form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
    path = tmp_path / "key"
    for other in (ec.generate_private_key(ec.SECP384R1()), ed25519.Ed25519PrivateKey.generate()):
        path.write_bytes(other.private_bytes(pem, pkcs8, nothing))
        with pytest.raises(UserError, match="not a P-256 key"):
            SigningKey.read(path)
        public = other.public_key().public_bytes(pem, form.PublicFormat.SubjectPublicKeyInfo)
        with pytest.raises(UserError, match="not a P-256 key"):
            PublicKey.parse(public)
    locked = SigningKey.generate().key.private_bytes(pem, pkcs8, form.BestAvailableEncryption(b"secret"))
    path.write_bytes(locked)
    with pytest.raises(UserError, match="password"):
        SigningKey.read(path)
    for junk in (b"", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", b"\xff" * 100):
        path.write_bytes(junk)
        with pytest.raises(UserError, match="not a private key"):
            SigningKey.read(path)
        with pytest.raises(UserError, match="not a public key"):
            PublicKey.read(path)


def test_a_key_is_never_written_over_anything(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, words in {"there": "exists already", "link": "leads nowhere", ".": "is not a file"}.items():
        with pytest.raises(UserError, match=words):
            write_private(tmp_path / name, b"key")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(UserError, match="there is not a directory"):
        write_private(tmp_path / "there" / "key", b"key")
    for bad in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match=r"regular file|cannot be read"):
            DataKey.read(bad)


@pytest.mark.parametrize(
    "recipient",
    [
        "age1qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq5cu47z",  # 0
        "age1qyqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqj7vrya",  # 1
        "age1ur4h5lpmgxu2u9jku0a0r87ydtdqnr0tnsetrlvxvgz3vh6fhqqqzyt4v9",  # of order 8
    ],
)
def test_points_of_low_order_are_no_recipients(recipient: str) -> None:
    assert str(pyrage.x25519.Recipient.from_str(recipient)) == recipient
    with pytest.raises(pyrage.RecipientError):
        parse_recipient(recipient)
    with pytest.raises(UserError, match="is not an age X25519 recipient"):
        parse_recipients([recipient])
