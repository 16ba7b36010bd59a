"""The identity of the node: its key, which never leaves the machine, and the id that it got when it enrolled."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from slotkeeper import signatures
from slotkeeper.agent.config import InvalidConfig
from slotkeeper.agent.files import write_file

_KEY_FILE, _NEW_KEY_FILE, _NODE_FILE = "key.pem", "next-key.pem", "node.json"


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """Who the node is.  instance: random, of this process."""

    id: str
    name: str
    key: Ed25519PrivateKey
    instance: str

    @property
    def key_id(self) -> str:
        return signatures.key_id(signatures.public_key_of(self.key))


def load_identity(state_dir: Path) -> AgentIdentity:
    """Return the identity of an enrolled node.  Raises InvalidConfig."""
    try:
        stored = orjson.loads((state_dir / _NODE_FILE).read_bytes())
        key = signatures.read_key(state_dir / _KEY_FILE)
        return AgentIdentity(stored["id"], stored["name"], key, secrets.token_hex(8))
    except (OSError, ValueError, KeyError, signatures.BadKey) as error:
        raise InvalidConfig(
            f"{state_dir} has no enrolled node ({error}): run `slotkeeper agent enroll URL` with a token"
        ) from None


def enroll(state_dir: Path, name: str, token: str, post: Callable[[dict[str, str]], dict[str, Any]]) -> AgentIdentity:
    """Enrol the node, and store what identifies it.  If the answer is lost, call it again: the key is kept.

    post: sends the request, and returns the response.  Raises InvalidConfig: it is enrolled already; OSError.
    """
    if (state_dir / _NODE_FILE).exists():
        raise InvalidConfig(f"{state_dir} has an enrolled node already; for another give another state_dir")
    key = _load_or_make_key(state_dir)
    public = signatures.public_key_of(key)
    proof = signatures.sign(key, signatures.ENROLMENT_TYPE, signatures.enrolment_statement(token, public))
    enrolled = post(
        {
            "token": token,
            "name": name,
            "public_key": signatures.encode_bytes(public),
            "proof": signatures.encode_bytes(proof),
        }
    )
    write_file(state_dir / _NODE_FILE, orjson.dumps({"id": enrolled["id"], "name": enrolled["name"]}))
    return load_identity(state_dir)


def make_new_key(state_dir: Path) -> str:
    """Make a key that replaces the present one as soon as the gateway accepts it, and return its id.

    Raises InvalidConfig: there is one already; OSError.
    """
    path = state_dir / _NEW_KEY_FILE
    if path.exists():
        raise InvalidConfig(f"{path} waits for the gateway already; start the agent")
    key = signatures.make_key()
    write_file(path, signatures.encode_key(key))
    return signatures.key_id(signatures.public_key_of(key))


def find_new_key(state_dir: Path) -> Ed25519PrivateKey | None:
    """Return the key that is to replace the present one; None: there is none."""
    try:
        return signatures.read_key(state_dir / _NEW_KEY_FILE)
    except (OSError, signatures.BadKey):
        return None


def use_new_key(state_dir: Path, identity: AgentIdentity) -> AgentIdentity:
    """Replace the key by the new one, which the gateway has stored.  Raises OSError."""
    (state_dir / _NEW_KEY_FILE).rename(state_dir / _KEY_FILE)
    return replace(identity, key=signatures.read_key(state_dir / _KEY_FILE))


def _load_or_make_key(state_dir: Path) -> Ed25519PrivateKey:
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = state_dir / _KEY_FILE
    if not path.exists():
        write_file(path, signatures.encode_key(signatures.make_key()))
    try:
        return signatures.read_key(path)
    except signatures.BadKey as error:
        raise InvalidConfig(str(error)) from None
