"""The command `slotkeeper verify`, which needs no network."""

import hashlib
import json
from pathlib import Path
from typing import Any, NoReturn

import click

from app.cli.output import print_fields
from app.terminal import echo

_INVALID, _UNREADABLE = 1, 2


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--keys",
    "keys_path",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Keys that you trust: JSON, id -> public key as base64.  [default: the key in the bundle]",
)
def verify(bundle: Path, keys_path: Path | None) -> None:
    """Check the signed result of a node, as `slotkeeper envelope` has printed it.

    BUNDLE: the file.  Exit status: 0 valid, 1 not valid, 2 unreadable.
    """
    from slotkeeper import signatures

    found = _read_json(bundle)
    try:
        given = {found["key_id"]: found["public_key"]} if keys_path is None else _read_json(keys_path)
        keys = {str(name): signatures.decode_bytes(key) for name, key in given.items() if key is not None}
        envelope, result, payload = found["envelope"], found["result"], found.get("payload")
    except (KeyError, TypeError, ValueError) as error:
        _fail(_UNREADABLE, f"{bundle} is no signed result: {error!r}")
    try:
        statement = signatures.RunStatement.decode(signatures.verify_envelope(envelope, keys).statement)
    except signatures.BadEnvelope as bad:
        _fail(_INVALID, f"Not valid: {bad}.")
    for name, text, stated in (
        ("result", result, statement.result_sha256),
        ("payload", payload, statement.payload_sha256),
    ):
        if text is not None and hashlib.sha256(str(text).encode()).hexdigest() != stated:
            _fail(_INVALID, f"Not valid: it is about another {name}.")
    print_fields(statement._asdict())
    if payload is None:
        echo("The payload is not in the file, so it was not checked.", err=True)
    if keys_path is None:
        echo("Valid for the key that came with the file; --keys checks it by keys that you trust.", err=True)
    else:
        echo("Valid.", err=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        _fail(_UNREADABLE, f"{path} cannot be read: {error}")
    if not isinstance(value, dict):
        _fail(_UNREADABLE, f"{path} is no JSON object")
    return value


def _fail(status: int, message: str) -> NoReturn:
    echo(f"Error: {message}", err=True)
    raise SystemExit(status)
