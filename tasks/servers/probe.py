"""Finds out which preset fits a server, and tries a description on it, exchange by exchange.

`recognize` requests the paths whose responses are signs of a preset.  `Trial` runs one job as a worker would, and names
the rule that judged each response.  Neither returns headers, and secrets in a text are masked before it is shortened.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from urllib.parse import urlsplit

from routing.dispatch.outcome import Outcome, OutcomeKind
from slotkeeper.urls import find_secrets_in_url
from tasks.servers import presets
from tasks.servers.adapter import HttpRequest, ServerAdapter
from tasks.servers.compiled import CompiledHealth, CompiledStep
from tasks.servers.description import Description, HealthRule, Rule
from tasks.servers.endpoint import Endpoint, parse_endpoint, quote_target
from tasks.servers.http_client import HttpClient
from tasks.servers.pointers import parse, resolve
from tasks.servers.responses import NOT_JSON, NoResponse, Response, redact
from tasks.servers.rules import compile_rule, find_rule
from tasks.servers.session import ServerSession
from tasks.servers.templates import SecretLookup, to_json
from tasks.servers.values import Health, Limits, RunDetails

GENERIC = "generic-sync"
_MIN_WEIGHT = 3  # A preset is proposed if its signs have at least this weight together.
_CONNECT_S, _READ_S = 2.0, 4.0  # of the request for one path
_MAX_BYTES = 1024 * 1024  # of the response to it
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class ProbedExchange:
    """One exchange.  status: None if there was no response.  rule: the rule that matched; means: its `then`."""

    step: str
    request: str
    status: int | None
    answer: str
    took_ms: int
    sent: str | None = None
    rule: str | None = None
    means: str | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A preset that a server's responses are signs of.  weight: the sum over its signs."""

    preset: str
    weight: int
    because: str


@dataclass(frozen=True, slots=True)
class Recognition:
    """The result of `recognize`.  is_there: a server responds.  candidates: the one with the most weight first."""

    is_there: bool
    candidates: tuple[Candidate, ...]
    exchanges: tuple[ProbedExchange, ...]
    model: str | None = None  # the name of a model that the server reports

    @property
    def presets(self) -> Sequence[str]:
        """Return the presets to try, in this order; empty: no server responds."""
        proposed = [one.preset for one in self.candidates if one.weight >= _MIN_WEIGHT]
        return [*proposed, GENERIC] if self.is_there else []

    @property
    def preset(self) -> str | None:
        """Return the first preset to try; None: no server responds."""
        return next(iter(self.presets), None)


async def recognize(url: str, http: HttpClient, deadline_s: float = 20.0) -> Recognition:
    """Request the paths that have signs of presets, each once.  Raises ValueError if `url` is not http or https."""
    endpoint = parse_endpoint(url)
    end = time.monotonic() + deadline_s
    exchanges, candidates, is_there = [], dict[str, Candidate](), False
    for path, signs in groupby(_signs(), key=lambda one: one[1].path):
        reply, exchange = await _probe_path(http, endpoint, path, end)
        exchanges.append(exchange)
        if isinstance(reply, NoResponse):
            if not is_there and exchange.status is None and reply.reason == "connect":
                break  # No server listens: every other request would fail, too.
            continue
        is_there = True
        for preset, sign in signs:
            if compile_rule(_as_rule(sign)).holds_for(reply, None):
                earlier = candidates.get(preset)
                weight = sign.weight + (earlier.weight if earlier else 0)
                candidates[preset] = Candidate(preset, weight, f"GET {path} answered as its servers do")
    ranked = tuple(sorted(candidates.values(), key=lambda one: (-one.weight, one.preset)))
    model = await _read_model_name(http, endpoint, ranked[0].preset, end) if ranked else None
    return Recognition(is_there, ranked, tuple(exchanges), model)


def endpoint_for(url: str, preset: str, model: str | None) -> str:
    """Return the endpoint to register: `url`, and if it has no path, the preset's path behind it."""
    endpoint = parse_endpoint(url)
    if endpoint.target != "/":
        return endpoint.url
    path = urlsplit(presets.info(preset).endpoint)._replace(scheme="", netloc="").geturl()
    return endpoint.url.rstrip("/") + path.replace("MODEL", model or "MODEL")


def _signs() -> list[tuple[str, presets.Sign]]:
    """Return all signs, each with the name of its preset, sorted by path."""
    signs = [(name, sign) for name in presets.names() for sign in presets.info(name).signs]
    return sorted(signs, key=lambda one: one[1].path)


def _as_rule(sign: presets.Sign) -> HealthRule:
    return HealthRule(when=sign.when, then="up")


async def _probe_path(
    http: HttpClient, endpoint: Endpoint, path: str, end: float
) -> tuple[Response | NoResponse, ProbedExchange]:
    limits = Limits(_CONNECT_S, _READ_S, min(end, time.monotonic() + _CONNECT_S + _READ_S), _MAX_BYTES)
    started = time.monotonic()
    reply = await http.send("GET", endpoint, quote_target(path), {"X-Source": "dispatcher"}, None, limits).reply
    return reply, _make_exchange("look", f"GET {path}", reply, started)


async def _read_model_name(http: HttpClient, endpoint: Endpoint, preset: str, end: float) -> str | None:
    place = presets.info(preset).model
    if place is None:
        return None
    reply, _ = await _probe_path(http, endpoint, place.path, end)
    if isinstance(reply, NoResponse) or reply.json is NOT_JSON:
        return None
    return _find_model_name(reply.json, place)


def _find_model_name(answer: Any, place: presets.ModelNameSource) -> str | None:
    """Return the name without slashes around it: some servers report their models' paths."""
    if place.items is not None:
        items, flag = resolve(answer, parse(place.items)), parse(place.flag)
        items = items if isinstance(items, list) else []
        answer = next((item for item in items if resolve(item, flag) is True), None)
    name = resolve(answer, parse(place.pointer))
    if isinstance(name, dict):
        name = next(iter(name), None)
    return name.strip("/") or None if isinstance(name, str) else None


@dataclass
class Trial:
    """Calls one server as a description says, and keeps each exchange."""

    endpoint: str
    description: Description
    secret: SecretLookup | None = None
    exchanges: list[ProbedExchange] = field(default_factory=list)
    _secrets: set[str] = field(default_factory=set)
    _remote_id: str | None = None  # the server's id of the run

    def __post_init__(self) -> None:
        self._secrets.update(find_secrets_in_url(self.endpoint))
        self._server = ServerAdapter(self.endpoint, self.description, secret=self._look_up_secret)

    async def health(self, http: HttpClient) -> Health:
        """Request the server's health."""
        return await self._session(http).health()

    async def run(self, http: HttpClient, payload: Any, patience_s: float) -> Outcome:
        """Run one job as a worker would, for at most `patience_s`; then cancel it."""
        run = RunDetails(f"probe-{time.time_ns():x}", 1, payload, deadline_s=patience_s)
        session, end = self._session(http), time.monotonic() + patience_s
        outcome = await session.submit(run)
        self._remote_id = remote_id = outcome.remote_id
        while outcome.kind is OutcomeKind.PENDING and remote_id and time.monotonic() < end:
            await asyncio.sleep(min(_POLL_S, max(end - time.monotonic(), 0)))
            outcome = await session.status(run, remote_id)
        if outcome.kind in (OutcomeKind.PENDING, OutcomeKind.UNKNOWN) and self.description.cancel is not None:
            await session.cancel(run, remote_id)
        return outcome

    def redacted(self, value: Any) -> str:
        """Return a value as a short text without secrets."""
        return redact(value if isinstance(value, str) else to_json(value).decode(), self._secrets)

    def _look_up_secret(self, name: str) -> str | None:
        value = self.secret(name) if self.secret else None
        if value:
            self._secrets.add(value)
        return value

    def _session(self, http: HttpClient) -> "_RecordedSession":
        return _RecordedSession(self._server, http, self)

    def add(
        self, step: CompiledStep | CompiledHealth, request: HttpRequest, reply: Response | NoResponse, started: float
    ) -> None:
        """Keep an exchange.  started: the monotonic time at which the request was sent."""
        rule, means = _matching_rule(step, reply, self._remote_id)
        name = step.place.partition("[")[0]
        sent = None if request.body is None else self.redacted(request.body.decode("utf-8", "replace"))
        line = self.redacted(f"{request.method} {request.target}")
        self.exchanges.append(
            _make_exchange(name, line, reply, started, sent=sent, rule=rule, means=means, secrets=self._secrets)
        )


class _RecordedSession(ServerSession):
    """A session whose exchanges a Trial keeps."""

    def __init__(self, server: ServerAdapter, http: HttpClient, trial: Trial) -> None:
        super().__init__(server, http)
        self._trial = trial

    async def send(self, step: CompiledStep | CompiledHealth, request: HttpRequest) -> Response | NoResponse:
        started = time.monotonic()
        reply = await super().send(step, request)
        self._trial.add(step, request, reply, started)
        return reply


def _matching_rule(
    step: CompiledStep | CompiledHealth, reply: Response | NoResponse, remote_id: str | None
) -> tuple[str | None, str | None]:
    """Return the rule that matches the reply, as text with its place, and its `then`; or twice None."""
    number = find_rule(step.judge.rules, reply, remote_id)
    if number is None:
        return None, None
    rule = step.rules[number]
    where = f"{step.place}.rules[{number}]" if number < step.own_rules else "default"
    return f"{where}: {_rule_as_json(rule)}", rule.then


def _rule_as_json(rule: Rule | HealthRule) -> str:
    return to_json(rule.model_dump(mode="json", exclude_defaults=True)).decode()


def _make_exchange(
    step: str,
    request: str,
    reply: Response | NoResponse,
    started: float,
    *,
    secrets: set[str] | None = None,
    **more: Any,
) -> ProbedExchange:
    took_ms = round((time.monotonic() - started) * 1000)
    if isinstance(reply, NoResponse):
        return ProbedExchange(step, request, None, reply.message, took_ms, **more)
    return ProbedExchange(step, request, reply.status, redact(reply.beginning, secrets or ()), took_ms, **more)
