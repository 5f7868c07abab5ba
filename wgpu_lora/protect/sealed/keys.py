"""Keys: age X25519 identities (age-encryption.org/v1), to which data are sealed, and P-256 keys, which sign.

Private keys of a run exist in its memory alone. Only `protect keygen` writes keys, with `write_private`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import pyrage
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from securesystemslib.signer import CryptoSigner, SSlibKey

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import new_file, write_new_bytes
from wgpu_lora.files.json_files import small_file
from wgpu_lora.files.locks import check_output, unwritable
from wgpu_lora.protect.memory_protection import lock_pages

MAX_KEY_BYTES = 64 << 10  # of a file of keys or recipients
SECRET = b"AGE-SECRET-KEY-1"
P256 = "is not a P-256 key: make one with wgpu-lora protect keygen --signing."


class _Secret:
    """A key that `with` wipes at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wipe()

    def wipe(self) -> None:
        """Drops the key, which its library overwrites then; it cannot be used afterwards."""
        raise NotImplementedError


class DataKey(_Secret):
    """An age X25519 identity; whoever has it opens all that was sealed to its recipient.

    The key is in pyrage's object alone, which overwrites it when it is dropped, and whose page is locked in memory
    where the system allows it. Its text exists only where it is asked for or parsed: Python's immutable str and bytes,
    and copies in the libraries, cannot be overwritten.

    Attributes:
        recipient: the public half, "age1...". locked: whether the key cannot be swapped out.
    """

    def __init__(self, identity: pyrage.x25519.Identity) -> None:
        self._identity: pyrage.x25519.Identity | None = identity
        self.recipient = str(identity.to_public())
        self.locked = lock_pages(id(identity), sys.getsizeof(identity))  # it holds the key itself, not a pointer

    def __repr__(self) -> str:  # the key itself must not come into messages
        return f"DataKey({self.recipient})"

    @classmethod
    def generate(cls) -> Self:
        return cls(pyrage.x25519.Identity.generate())

    @classmethod
    def parse(cls, text: bytes | bytearray, where: str = "The key") -> Self:
        """An identity from an age identity file's text: lines of "#" and one of "AGE-SECRET-KEY-1...".

        Args:
            where: start of messages. They never contain the text.

        Raises:
            UserError: there is no identity, or more than one, or it is damaged.
        """
        lines = [line.strip() for line in bytes(text).splitlines()]
        identities = [line for line in lines if line and not line.startswith(b"#")]
        if len(identities) != 1 or not identities[0].upper().startswith(SECRET):
            problem = "has several lines that are not comments" if len(identities) > 1 else "has no age identity"
            raise UserError(
                f"{where} {problem}: give a file as wgpu-lora protect keygen or age-keygen makes it, with one line "
                "that starts with AGE-SECRET-KEY-1."
            )
        try:
            return cls(pyrage.x25519.Identity.from_str(identities[0].decode("ascii").upper()))
        except (pyrage.IdentityError, UnicodeDecodeError):
            raise UserError(f"{where} holds a damaged age identity: restore it from a copy.") from None

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Reads an age identity file. Raises UserError, as `parse`, or if it cannot be read."""
        return cls.parse(small_file(path, "The key", MAX_KEY_BYTES), str(path))

    def identity(self) -> pyrage.x25519.Identity:
        """pyrage's object. Raises ValueError after `wipe`."""
        if self._identity is None:
            raise ValueError("the key has been wiped")
        return self._identity

    def text(self) -> bytes:
        """AGE-SECRET-KEY-1..., as a copy that cannot be wiped. Raises ValueError after `wipe`."""
        return str(self.identity()).encode()

    def file_text(self) -> bytes:
        """An identity file as age-keygen writes it."""
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return b"# created: %s\n# public key: %s\n%s\n" % (created.encode(), self.recipient.encode(), self.text())

    def wipe(self) -> None:
        self._identity = None


@dataclass(frozen=True)
class PublicKey:
    """A P-256 public key that verifies signatures.

    Attributes:
        pem: SubjectPublicKeyInfo in PEM, in one spelling for each key.
        keyid: as securesystemslib computes it: SHA-256, in hexadecimal, of the key in canonical JSON.
    """

    pem: str
    keyid: str

    @classmethod
    def parse(cls, pem: str | bytes, where: str = "The public key") -> Self:
        """A key from PEM. Raises UserError if it is not a P-256 public key."""
        data = pem.encode() if isinstance(pem, str) else pem
        try:
            if len(data) > MAX_KEY_BYTES:
                raise ValueError("too long")
            key = serialization.load_pem_public_key(data)
        except (ValueError, UnsupportedAlgorithm):
            raise UserError(
                f"{where} is not a public key in PEM: give the .pub file that wgpu-lora protect keygen --signing wrote."
            ) from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise UserError(f"{where} {P256}")
        return cls.of(key)

    @classmethod
    def of(cls, key: ec.EllipticCurvePublicKey) -> Self:
        ssl_key = SSlibKey.from_crypto(key)
        return cls(ssl_key.keyval["public"], ssl_key.keyid)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Reads a PEM file. Raises UserError, as `parse`, or if it cannot be read."""
        return cls.parse(small_file(path, "The public key", MAX_KEY_BYTES), str(path))

    def crypto_key(self) -> ec.EllipticCurvePublicKey:
        key = serialization.load_pem_public_key(self.pem.encode())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        return key

    def ssl_key(self) -> SSlibKey:
        """securesystemslib's object, which verifies DSSE signatures."""
        return SSlibKey.from_crypto(self.crypto_key(), self.keyid)


class SigningKey(_Secret):
    """An ECDSA key on P-256 (FIPS 186-5, SHA-256). OpenSSL overwrites it when it is dropped.

    Attributes:
        public: what verifies its signatures.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key: ec.EllipticCurvePrivateKey | None = key
        self.public = PublicKey.of(key.public_key())

    def __repr__(self) -> str:
        return f"SigningKey({self.public.keyid})"

    @classmethod
    def generate(cls) -> Self:
        return cls(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Reads a P-256 private key in PEM, without a password. Raises UserError: it cannot be read, or is none."""
        try:
            key = serialization.load_pem_private_key(small_file(path, "The signing key", MAX_KEY_BYTES), None)
        except TypeError:
            raise UserError(f"{path} is protected by a password: give a key without one.") from None
        except (ValueError, UnsupportedAlgorithm):
            raise UserError(
                f"{path} is not a private key in PEM: give the file that wgpu-lora protect keygen --signing wrote."
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise UserError(f"{path} {P256}")
        return cls(key)

    @property
    def key(self) -> ec.EllipticCurvePrivateKey:
        """cryptography's object. Raises ValueError after `wipe`."""
        if self._key is None:
            raise ValueError("the key has been wiped")
        return self._key

    @property
    def signer(self) -> CryptoSigner:
        """securesystemslib's object, which makes DSSE signatures. Raises ValueError after `wipe`."""
        return CryptoSigner(self.key, self.public.ssl_key())

    def private_pem(self) -> bytes:
        """PKCS #8 in PEM. Raises ValueError after `wipe`."""
        no_password = serialization.NoEncryption()
        return self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password)

    def wipe(self) -> None:
        self._key = None


@dataclass
class SessionKeys(_Secret):
    """The two ephemeral keys of a session: the data key is released to `data`, and `signing` signs its evidence."""

    data: DataKey
    signing: SigningKey

    @classmethod
    def generate(cls) -> Self:
        return cls(DataKey.generate(), SigningKey.generate())

    def wipe(self) -> None:
        self.data.wipe()
        self.signing.wipe()


# -- files -------------------------------------------------------------------------------------------------------------


def new_data_key(path: Path) -> str:
    """Writes a new age identity and returns its recipient. Raises UserError if the path exists or cannot be written."""
    with DataKey.generate() as key:
        write_private(path, key.file_text())
        return key.recipient


def new_signing_key(path: Path) -> PublicKey:
    """Writes a new P-256 key to `path` (PKCS #8 in PEM), and its public half to PATH.pub.

    Raises:
        UserError: one of the two exists or cannot be written; then neither is left.
    """
    with SigningKey.generate() as key:
        write_private(path, key.private_pem())
        try:
            write_new_bytes(path.with_name(f"{path.name}.pub"), key.public.pem.encode(), "PATH")
        except BaseException:
            path.unlink()
            raise
        return key.public


def write_private(path: str | Path, content: bytes) -> None:
    """Writes a new file, in a directory that is made if missing, that only its owner may read (except on Windows).

    Raises:
        UserError: the path exists, or cannot be written; then nothing is left of it.
    """
    path = Path(path)
    if path.name in ("", "-", ".."):
        raise UserError(f"A key is written to a file of its own, not to '{path}': give a path, such as data.key.")
    check_output(path, "PATH")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, "PATH", error) from None
    with new_file(path, "PATH", private=True) as temporary:
        temporary.write_bytes(content)
