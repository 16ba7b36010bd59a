"""Tokens in Celery's messages: for which tenant, and with which key, a message submits a job.

A broker keeps messages, for all to read who can read the broker.  So a message has a token in place of a key: it
submits jobs by Celery and does nothing else, it ends, and it is valid only while its key is.  Nothing is stored of it.
"""

from hashlib import sha256
from typing import Any, NamedTuple

from itsdangerous import BadData, URLSafeSerializer

from slotkeeper.clock import now_ms
from slotkeeper.errors import Unauthorized
from tasks.security.keyring import celery_keys

PREFIX = "skt_"
_MAX_CHARS = 2000  # The rest of a token is not read.
_SIGNER: dict[str, Any] = {"digest_method": sha256}


class TokenSubject(NamedTuple):
    """The tenant whose jobs are submitted, and the id of the key; None: its job came without a key.

    key_owner: the tenant of the key if that is another, which operates.
    """

    tenant: str
    key_id: str | None
    key_owner: str | None = None


def make_token(subject: TokenSubject, expires_ms: int) -> str:
    """Return a token that is valid until then (ms), while the key is."""
    return PREFIX + str(_serializer().dumps([*subject, expires_ms]))


def read_token(token: object) -> TokenSubject:
    """Return what a token says.  Raises Unauthorized: it was not made here, or it has expired."""
    if not isinstance(token, str) or not token.startswith(PREFIX):
        raise Unauthorized(
            "The header slotkeeper_token must have a token (skt_…), not a key: the broker keeps messages.  If it was a "
            "key, revoke it; `slotkeeper keys token` makes tokens."
        )
    try:
        *subject, expires_ms = _serializer().loads(token[len(PREFIX) : _MAX_CHARS])
    except BadData:
        raise Unauthorized(
            "The token in the header slotkeeper_token is not valid; take it over as it was made."
        ) from None
    if now_ms() >= expires_ms:
        raise Unauthorized("The token in the header slotkeeper_token has expired; make another.")
    return TokenSubject(*subject)


def _serializer() -> URLSafeSerializer:
    return URLSafeSerializer(list(celery_keys()), salt="celery", signer_kwargs=_SIGNER)
