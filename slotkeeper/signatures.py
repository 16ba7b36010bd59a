"""Signatures of nodes (Ed25519): signed envelopes of results, and the proofs with which a node connects.

An envelope is a DSSE 1.0 envelope (https://github.com/secure-systems-lab/dsse).  Its signature covers the bytes as they
were sent, together with their type, so no JSON has to be encoded again to verify it.

Processes without nodes import this module too, so `cryptography` is loaded by its first use.
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

RUN_TYPE = "application/vnd.slotkeeper.run.v1+json"
"""Type of the statement about a run."""
HELLO_TYPE = "application/vnd.slotkeeper.hello.v1"
"""Type of the proof with which a node connects."""
ENROLMENT_TYPE = "application/vnd.slotkeeper.enrolment.v1"
"""Type of the proof with which a node enrols."""
ROTATION_TYPE = "application/vnd.slotkeeper.rotation.v1"
"""Type of the proofs with which a node replaces its key."""
MAX_ENVELOPE_BYTES = 16 << 10
PUBLIC_KEY_BYTES = 32
_KEY_ID_DIGITS = 16


class BadEnvelope(Exception):
    """The envelope is not valid, or not about this run.  The text says why, as a clause."""


class BadKey(Exception):
    """The text is no Ed25519 key.  The text says why."""


class RunStatement(NamedTuple):
    """What a node states about a run, when it is asked for its result."""

    job: str
    attempt: int
    """The attempt that asked."""
    run_attempt: int
    """The attempt whose request began the run.  A later attempt gets the result of a finished run."""
    model: str
    model_version: str
    node: str
    declaration: str
    """The digest of the declaration that the node had sent last."""
    payload_sha256: str
    result_sha256: str
    started_ms: int
    ended_ms: int
    """Both Unix times by the node's clock: its claim."""

    def encode(self) -> bytes:
        """Return the statement as the bytes that are signed."""
        return orjson.dumps(self._asdict())

    @classmethod
    def decode(cls, statement: bytes) -> "RunStatement":
        """Return the statement of these bytes.  Raises BadEnvelope."""
        try:
            fields = orjson.loads(statement)
            return cls(**{name: _checked(fields[name], kind) for name, kind in cls.__annotations__.items()})
        except (ValueError, KeyError, TypeError):
            raise BadEnvelope("its statement is not one about a run") from None


class Verified(NamedTuple):
    """The statement of an envelope whose signature is valid, and the id of the key that signed it."""

    statement: bytes
    key_id: str


def make_key() -> "Ed25519PrivateKey":
    """Return a new private key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate()


def encode_key(key: "Ed25519PrivateKey") -> bytes:
    """Return a private key as PEM."""
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_key(path: Path) -> "Ed25519PrivateKey":
    """Return the private key of a PEM file.  Raises OSError, BadKey."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise BadKey(f"{path} contains no private key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise BadKey(f"{path} contains a key of another kind than Ed25519")
    return key


def public_key_of(key: "Ed25519PrivateKey") -> bytes:
    """Return the public key, 32 bytes."""
    return key.public_key().public_bytes_raw()


def key_id(public_key: bytes) -> str:
    """Return the id of a public key."""
    return hashlib.sha256(public_key).hexdigest()[:_KEY_ID_DIGITS]


def encode_bytes(data: bytes) -> str:
    """Return bytes as base64."""
    return base64.b64encode(data).decode()


def decode_bytes(text: Any) -> bytes:
    """Return the bytes of a base64 text.  Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError("it is no text")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def pre_authentication(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that a signature covers: PAE of DSSE 1.0."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def join_parts(*parts: bytes | str) -> bytes:
    """Return several values as bytes from which each can be read again, for a proof."""
    encoded = (part.encode() if isinstance(part, str) else part for part in parts)
    return b"".join(b"%d:%b," % (len(part), part) for part in encoded)


def sign(key: "Ed25519PrivateKey", payload_type: str, payload: bytes) -> bytes:
    """Return the signature over a payload and its type."""
    return key.sign(pre_authentication(payload_type, payload))


def is_signed(public_key: bytes, payload_type: str, payload: bytes, signature: bytes) -> bool:
    """Return whether the signature over a payload and its type is valid."""
    from cryptography.exceptions import InvalidSignature

    try:
        _decode_public_key(public_key).verify(signature, pre_authentication(payload_type, payload))
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=1024)
def _decode_public_key(public_key: bytes) -> "Ed25519PublicKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(public_key)


def enrolment_statement(token: str, public_key: bytes) -> bytes:
    """Return what a node signs when it enrols."""
    return join_parts(hashlib.sha256(token.encode()).digest(), public_key)


def sign_envelope(statement: bytes, key: "Ed25519PrivateKey") -> dict[str, Any]:
    """Return the envelope of a statement about a run, as JSON."""
    signature = {"keyid": key_id(public_key_of(key)), "sig": encode_bytes(sign(key, RUN_TYPE, statement))}
    return {"payloadType": RUN_TYPE, "payload": encode_bytes(statement), "signatures": [signature]}


def verify_envelope(envelope: Any, keys: Mapping[str, bytes]) -> Verified:
    """Return the statement of an envelope that one of these keys has signed.

    keys: public keys by their id.
    Raises BadEnvelope.
    """
    statement, signatures = _read_envelope(envelope)
    for signature in signatures:
        name = signature.get("keyid")
        if not isinstance(name, str) or name not in keys:
            continue
        try:
            text = decode_bytes(signature.get("sig"))
        except ValueError:
            continue
        if is_signed(keys[name], RUN_TYPE, statement, text):
            return Verified(statement, name)
        raise BadEnvelope(f"the signature of the key {name} is wrong")
    raise BadEnvelope("none of the node's valid keys has signed it")


def _read_envelope(envelope: Any) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the statement, which is not verified, and the signatures.  Raises BadEnvelope."""
    if not isinstance(envelope, Mapping):
        raise BadEnvelope("there is no envelope")
    if envelope.get("payloadType") != RUN_TYPE:
        raise BadEnvelope(f"its type is not {RUN_TYPE}")
    signatures = envelope.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != 1 or not isinstance(signatures[0], dict):
        raise BadEnvelope("it has not exactly one signature")
    try:
        statement = decode_bytes(envelope.get("payload"))
    except ValueError:
        raise BadEnvelope("its payload is not base64") from None
    if len(statement) > MAX_ENVELOPE_BYTES:
        raise BadEnvelope(f"its statement has more than {MAX_ENVELOPE_BYTES} bytes")
    return statement, signatures


def _checked(value: Any, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError("a member of the statement has the wrong type")
    return value
