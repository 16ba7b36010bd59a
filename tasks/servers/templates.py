"""Templates insert values into requests: {{payload/prompt}}, {{job/id}}, {{run/swap}}, {{id}}, {{secret/NAME}}.

A path may begin with {{endpoint}}, the path of the registered endpoint ("" for http://gpu1:9001/), so that one
description serves models that have their names in the URL, and servers behind a prefix.

A string that is exactly one template is replaced by the value with its JSON type; in a longer string the value is
inserted as text.  Inserted text is never expanded again, so a payload that contains "{{secret/KEY}}" stays unchanged.
There is no other logic: no conditions, no loops.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from routing.dispatch.outcome import OutcomeKind
from slotkeeper import json_text
from tasks.servers.pointers import MISSING, Pointer, parse, resolve
from tasks.servers.values import RunDetails

MAX_LENGTH = 2000


def check_path(path: str) -> None:
    """Check that this is a plain absolute path, with or without a query.  Raises ValueError if not.

    The path is percent-decoded first, repeatedly if necessary: some servers decode twice.
    """
    if not path.startswith("/") or "//" in path.partition("?")[0]:
        raise ValueError("a path starts with one '/', has no '//' and names no other server")
    if len(path) > MAX_LENGTH:
        raise ValueError(f"a path has at most {MAX_LENGTH} characters")
    if "#" in path or not _is_plain(_decode(path)):
        raise ValueError("a path has no '#', no backslash and no control characters")
    if any(_is_dot_segment(segment) for segment in _decode(path.partition("?")[0]).split("/")):
        raise ValueError("a path has no '.' or '..' segments, not even percent-encoded")


def _decode(path: str) -> str:
    for _ in range(5):
        decoded = unquote(path)
        if decoded == path:
            return path
        path = decoded
    raise ValueError("a path is not percent-encoded many times over")


def _is_plain(text: str) -> bool:
    return "\\" not in text and all(ch >= " " and ch != "\x7f" for ch in text)


def _is_dot_segment(segment: str) -> bool:
    return segment.partition(";")[0] in (".", "..")  # servlet containers read "..;x" as ".."


SecretLookup = Callable[[str], str | None]

_TEMPLATE = re.compile(r"\{\{([^{}]*)\}\}")
_FIELDS = {
    "job": {"id": "job_id", "attempt": "attempt", "attempt_id": "attempt_id", "model": "model"},
    "run": {
        "deadline_ms": "deadline_ms",
        "deadline_s": "whole_deadline_s",
        "model_version": "model_version",
        "output_size": "",
        "swap": "swap",
    },
}
_SECRET_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e\t]*[\x21-\x7e])?")
_UNRESERVED = re.compile(r"[A-Za-z0-9_-]+")
_MAX_HEADER_CHARS = 8_000  # common servers accept no more
_MAX_DEPTH = 32
_ENDPOINT = "endpoint"


class TemplateError(Exception):
    """A template could not be filled; the request was not sent."""

    def __init__(self, kind: OutcomeKind, code: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.code = kind, code


def _bad_payload(message: str) -> TemplateError:
    return TemplateError(OutcomeKind.FAILED, "bad_payload", message)


def _misconfigured(message: str) -> TemplateError:
    # Costs a retry, not the job: the operator may correct the secret or the path before the next try.
    return TemplateError(OutcomeKind.RETRY, "misconfigured", message)


@dataclass(frozen=True, slots=True)
class CompiledOutputSize:
    """The expected output of a run: the number at the first of these places in its payload, or the default."""

    places: tuple[Pointer, ...]
    default: int

    def of(self, payload: Any) -> int:
        """Return the size; places without a valid one are skipped, because the server validates the payload."""
        found = (resolve(payload, place) for place in self.places)
        sizes = (size for size in found if isinstance(size, int) and not isinstance(size, bool) and size >= 0)
        return next(sizes, self.default)


@dataclass(slots=True)
class TemplateValues:
    """The sources of template values in one exchange."""

    run: RunDetails | None  # None: a health check, which has no job
    remote_id: str | None = None
    secret: SecretLookup | None = None
    endpoint: str = ""  # the path of the registered endpoint, without a trailing slash
    output_size: CompiledOutputSize | None = None


@dataclass(frozen=True, slots=True)
class TemplateRef:
    """One template {{...}}, parsed."""

    source: str  # payload | job | run | id | callback_url | callback_token | secret | endpoint
    name: str = ""  # of the secret, or of the value of the job or the run
    field: str = ""  # attribute of RunDetails
    pointer: Pointer = ()  # into the payload
    raw: bool = False  # in a path: not percent-encoded

    def value(self, values: TemplateValues) -> Any:
        """Return the value to insert.  Raises TemplateError if there is none."""
        if self.source == "payload":
            return self._from_payload(values)
        found = self._secret(values) if self.source == "secret" else self._from_run(values)
        if found is None:
            raise _misconfigured(f"there is no value for {{{{{self.source}{'/' * bool(self.name)}{self.name}}}}}")
        return found

    def _from_payload(self, values: TemplateValues) -> Any:
        found = resolve(values.run.payload, self.pointer) if values.run else MISSING
        if found is MISSING:
            raise _bad_payload(f"the payload has no /{'/'.join(self.pointer)[:100]}, which this model needs")
        return found

    def _from_run(self, values: TemplateValues) -> Any:
        if self.source == "id":
            return values.remote_id
        if values.run is not None and self.name == "output_size":
            if values.output_size is None:
                return None
            return values.run.expected_output or values.output_size.of(values.run.payload)
        return getattr(values.run, self.field or self.source, None)

    def _secret(self, values: TemplateValues) -> str | None:
        return (values.secret(self.name) if values.secret else None) or None


Parts = tuple[str | TemplateRef, ...]


def parse_text(text: str, allowed: frozenset[str]) -> Parts:
    """Parse a text into literals and templates.  Raises ValueError for an unknown or forbidden name."""
    pieces = _TEMPLATE.split(text)  # literal, inside, literal, inside, ... literal
    if any("{{" in literal or "}}" in literal for literal in pieces[::2]):
        raise ValueError(f"an open or nested template in {text[:60]!r}")
    parts = (p if i % 2 == 0 else _parse_ref(p.strip(), allowed) for i, p in enumerate(pieces))
    return tuple(part for part in parts if part != "")


def _parse_ref(inside: str, allowed: frozenset[str]) -> TemplateRef:
    raw = inside.startswith("raw:")
    source, slash, rest = inside.removeprefix("raw:").partition("/")
    if source not in allowed or (raw and "raw" not in allowed):
        raise ValueError(f"{{{{{inside[:60]}}}}} is not known here; there is: {_permitted_names(allowed)}")
    if source == "payload":
        return TemplateRef(source, pointer=parse(slash + rest), raw=raw)
    if rest in (fields := _FIELDS.get(source, {})):
        return TemplateRef(source, name=rest, field=fields[rest], raw=raw)
    if source == "secret" and _SECRET_NAME.fullmatch(rest):
        return TemplateRef(source, name=rest, raw=raw)
    if source in ("secret", *_FIELDS) or slash:
        raise ValueError(f"{{{{{inside[:60]}}}}} names nothing that exists; there is: {_permitted_names(allowed)}")
    return TemplateRef(source, raw=raw)


def _permitted_names(allowed: frozenset[str]) -> str:
    """Return all names that a template may have, for messages."""
    below = {**_FIELDS, "payload": ["", "..."], "secret": ["NAME"], "raw": []}
    names = (f"{source}/{name}".rstrip("/") for source in allowed for name in below.get(source, [""]))
    return ", ".join(sorted(names))


def sources_in(text: str) -> list[tuple[str, str]]:
    """Return (source, name) of each template in a text, also of those that are not allowed."""
    named = (inside.strip().removeprefix("raw:").partition("/") for inside in _TEMPLATE.findall(text))
    return [(source, rest) for source, _, rest in named]


def secrets_in(text: str) -> list[str]:
    """Return the names of the secrets in the templates of a text."""
    return [name for source, name in sources_in(text) if source == "secret"]


def as_text(value: Any) -> str:
    """Return a value as it is inserted into a longer text: strings unquoted, all others as JSON."""
    return value if isinstance(value, str) else to_json(value).decode()


def to_json(value: Any) -> bytes:
    """Return the JSON of a payload or a body.  Raises TemplateError (final) if JSON cannot represent it."""
    try:
        return json_text.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise _bad_payload("the payload cannot be written as JSON") from None


class BodyTemplate:
    """A body template: any JSON value whose strings may contain templates."""

    def __init__(self, template: Any, allowed: frozenset[str]) -> None:
        self._node = _compile(template, allowed, _MAX_DEPTH)

    def fill(self, values: TemplateValues) -> Any:
        """Return the JSON value to send.  Raises TemplateError."""
        return _fill(self._node, values)


def _compile(node: Any, allowed: frozenset[str], depth: int) -> Any:
    if depth == 0:
        raise ValueError(f"a body template is at most {_MAX_DEPTH} levels deep")
    if isinstance(node, str):
        return parse_text(node, allowed)
    if isinstance(node, list):
        return [_compile(item, allowed, depth - 1) for item in node]
    if isinstance(node, dict):
        return {_check_key(key): _compile(item, allowed, depth - 1) for key, item in node.items()}
    return node


def _check_key(key: str) -> str:
    if "{{" in key:
        raise ValueError("templates stand in values, not in keys")
    return key


def _fill(node: Any, values: TemplateValues) -> Any:
    if isinstance(node, tuple):
        return _fill_text(node, values)
    if isinstance(node, list):
        return [_fill(item, values) for item in node]
    if isinstance(node, dict):
        return {key: _fill(item, values) for key, item in node.items()}
    return node


def _fill_text(parts: Parts, values: TemplateValues) -> Any:
    if len(parts) == 1 and isinstance(parts[0], TemplateRef):
        return parts[0].value(values)
    return "".join(part if isinstance(part, str) else as_text(part.value(values)) for part in parts)


class PathTemplate:
    """A path template.  Values are percent-encoded.  Raw values are not, but they cannot leave the path."""

    def __init__(self, template: str, allowed: frozenset[str]) -> None:
        allowed |= {"raw", _ENDPOINT}
        self._parts = parse_text(template, allowed)
        if any(_is_endpoint(part) for part in self._parts[1:]):
            raise ValueError("{{endpoint}} stands at the beginning of a path")
        check_path("".join(map(_example, self._parts)))
        query = template.partition("?")[2]
        if "{{" in query and any(isinstance(p, TemplateRef) and p.raw for p in parse_text(query, allowed)):
            raise ValueError("raw values stand in the path, not in the query")

    def fill(self, values: TemplateValues) -> str:
        """Return the path to request.  Raises TemplateError if a value would lead to another path or host."""
        path, needs_check = "", False
        for part in self._parts:
            if isinstance(part, str) or _is_endpoint(part):
                path += part if isinstance(part, str) else values.endpoint
                continue
            text = _path_value(part, values)
            if not _UNRESERVED.fullmatch(text):
                needs_check = True
                text = text if part.raw else quote(text, safe="")
            path += text
        if not path.startswith("/"):  # after an empty {{endpoint}}, the path would become a part of the host name
            raise _misconfigured(f"the registered endpoint needs a path, for {path[:60]!r} follows it")
        return _check_filled_path(path) if needs_check or len(path) > MAX_LENGTH else path


def _is_endpoint(part: str | TemplateRef) -> bool:
    return isinstance(part, TemplateRef) and part.source == _ENDPOINT


def _example(part: str | TemplateRef) -> str:
    """Return an example value, to check the path as a whole."""
    return part if isinstance(part, str) else "/x" if _is_endpoint(part) else "x"


def _path_value(ref: TemplateRef, values: TemplateValues) -> str:
    value = ref.value(values)
    value = as_text(value) if ref.source == "run" else value
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise _bad_payload("only a text or a whole number can be put into a path")
    text = str(value)
    if ref.raw and any(ch in "?#&" for ch in text):  # check_path refuses control characters
        raise _bad_payload("a value has characters that cannot be put into a path")
    return text


def _check_filled_path(path: str) -> str:
    try:
        check_path(path)
    except ValueError as error:
        raise _bad_payload(f"a value cannot be put into a path: {error}") from None
    return path


class HeaderTemplates:
    """Header templates.  The names of the headers are literal."""

    def __init__(self, templates: Mapping[str, str], allowed: frozenset[str]) -> None:
        self._parts = tuple((name, parse_text(text, allowed)) for name, text in templates.items())

    def fill(self, values: TemplateValues) -> dict[str, str]:
        """Return the header values, which contain no line breaks.  Raises TemplateError."""
        return {name: _header_value(_fill_text(parts, values)) for name, parts in self._parts}


def _header_value(value: Any) -> str:
    text = as_text(value)
    if len(text) > _MAX_HEADER_CHARS:
        raise _bad_payload(f"a value is too long for a header, which has at most {_MAX_HEADER_CHARS} characters")
    if not _HEADER_VALUE.fullmatch(text):
        raise _bad_payload("a value has characters that cannot be put into a header")
    return text
