"""The beginning of a connection: the gateway's challenge, the agent's hello, and why a connection is closed."""

import hashlib
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from slotkeeper import signatures
from slotkeeper.tunnel.frames import TunnelError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

CLOSE_STOPPING = 1001
"""The gateway stops: connect elsewhere."""
CLOSE_TRY_LATER = 1013
"""The gateway is full, or the database does not answer."""
CLOSE_PROTOCOL = 4400
CLOSE_REVOKED = 4401
"""The key is not valid: the agent must not try again."""
CLOSE_REFUSED = 4403
"""What the agent declares, or the host that it dialed, is not allowed: its owner has to change something."""
CLOSE_REPLACED = 4408
"""The same agent has another connection by now."""
CLOSE_OTHER_INSTANCE = 4409
"""Another process with the same key is connected."""

HANDSHAKE_S = 5.0
NONCE_BYTES = 32
MAX_REASON = 100
"""Characters; a close frame has 123 bytes."""
_MAX_TEXT = 200


class Hello(NamedTuple):
    """The agent's answer to the challenge.

    host: that it dialed.  instance: random, of this process of the agent.  declaration: JSON.
    takes_jobs: False: its owner has paused it, for `reason`.
    """

    node: str
    key: str
    signature: str
    host: str
    instance: str
    agent: str
    declaration: str
    takes_jobs: bool
    reason: str

    @classmethod
    def signed(
        cls,
        key: "Ed25519PrivateKey",
        nonce: bytes,
        *,
        node: str,
        host: str,
        instance: str,
        agent: str,
        declaration: bytes,
        why_not: str = "",
    ) -> "Hello":
        """Return the hello that answers a challenge.  why_not: why the agent takes no jobs now; "": it does."""
        statement = hello_statement(nonce, host, node, instance, declaration)
        return cls(
            node=node,
            key=signatures.key_id(signatures.public_key_of(key)),
            signature=signatures.encode_bytes(signatures.sign(key, signatures.HELLO_TYPE, statement)),
            host=host,
            instance=instance,
            agent=agent,
            declaration=declaration.decode(),
            takes_jobs=not why_not,
            reason=why_not,
        )

    def message(self) -> dict[str, Any]:
        """Return the control message."""
        return {"type": "hello", **self._asdict()}

    def is_signed_by(self, public_key: bytes, nonce: bytes) -> bool:
        """Return whether this key has signed it for this challenge."""
        statement = hello_statement(nonce, self.host, self.node, self.instance, self.declaration.encode())
        try:
            signature = signatures.decode_bytes(self.signature)
        except ValueError:
            return False
        return signatures.is_signed(public_key, signatures.HELLO_TYPE, statement, signature)


def clean_reason(text: str) -> str:
    """Return a text of an owner as one line of at most MAX_REASON characters."""
    return "".join(ch if ch.isprintable() else " " for ch in text)[:MAX_REASON]


def _is_name(text: str) -> bool:
    return len(text) <= _MAX_TEXT and text.isprintable()


def make_nonce() -> bytes:
    """Return the random bytes of a challenge."""
    return secrets.token_bytes(NONCE_BYTES)


def hello_statement(nonce: bytes, host: str, node: str, instance: str, declaration: bytes) -> bytes:
    """Return what the agent signs."""
    return signatures.join_parts(nonce, host, node, instance, hashlib.sha256(declaration).digest())


def read_hello(message: dict[str, Any]) -> Hello:
    """Return the hello of a control message.  Raises TunnelError."""
    values = dict[str, Any]()
    for name, kind in Hello.__annotations__.items():
        value = message.get(name)
        if not isinstance(value, kind):
            raise TunnelError(f"the hello has no {name}")
        if name == "reason":
            value = clean_reason(value)
        elif isinstance(value, str) and name != "declaration" and not _is_name(value):
            raise TunnelError(f"{name} of the hello is no printable text of at most {_MAX_TEXT} characters")
        values[name] = value
    if message.get("type") != "hello" or not values["instance"] or " " in values["instance"]:
        raise TunnelError("the first message is no hello")
    return Hello(**values)
