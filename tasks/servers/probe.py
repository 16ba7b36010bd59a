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

from routing.dispatch.outcome import Outcome, OutcomeKind
from slotkeeper.urls import find_secrets_in_url
from tasks.servers import presets
from tasks.servers.adapter import HttpRequest, Send, ServerAdapter, split_endpoint
from tasks.servers.call import Call, Health, Limits
from tasks.servers.default_rules import cancel_rules, health_rules, poll_rules, result_rules, submit_rules
from tasks.servers.description import Description, HealthRule, Rule
from tasks.servers.http_client import HttpClient
from tasks.servers.pointers import MISSING, parse, resolve
from tasks.servers.responses import NOT_JSON, NoResponse, Response, redact
from tasks.servers.rules import CompiledRule, compile_rule
from tasks.servers.templates import SecretLookup, to_json

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
    _, base = split_endpoint(url)
    end = time.monotonic() + deadline_s
    exchanges, candidates, is_there = [], dict[str, Candidate](), False
    for path, signs in groupby(_signs(), key=lambda one: one[1].path):
        reply, exchange = await _probe_path(http, base, path, end)
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
    model = await _read_model_name(http, base, ranked[0].preset, end) if ranked else None
    return Recognition(is_there, ranked, tuple(exchanges), model)


def endpoint_for(url: str, preset: str, model: str | None) -> str:
    """Return the endpoint to register: `url`, and if it has no path, the preset's path behind it."""
    whole, base = split_endpoint(url)
    if whole.removeprefix(base).rstrip("/"):
        return whole
    _, example = split_endpoint(presets.info(preset).endpoint)
    return base + presets.info(preset).endpoint.removeprefix(example).replace("MODEL", model or "MODEL")


def _signs() -> list[tuple[str, presets.Sign]]:
    """Return all signs, each with the name of its preset, sorted by path."""
    signs = [(name, sign) for name in presets.names() for sign in presets.info(name).signs]
    return sorted(signs, key=lambda one: one[1].path)


def _as_rule(sign: presets.Sign) -> HealthRule:
    return HealthRule(when=sign.when, then="up")


async def _probe_path(
    http: HttpClient, base: str, path: str, end: float
) -> tuple[Response | NoResponse, ProbedExchange]:
    limits = Limits(_CONNECT_S, _READ_S, min(end, time.monotonic() + _CONNECT_S + _READ_S), _MAX_BYTES)
    started = time.monotonic()
    reply = await http.send("GET", base + path, {"X-Source": "dispatcher"}, None, limits).reply
    return reply, _make_exchange("look", f"GET {path}", reply, started)


async def _read_model_name(http: HttpClient, base: str, preset: str, end: float) -> str | None:
    place = presets.info(preset).model
    if place is None:
        return None
    reply, _ = await _probe_path(http, base, place.path, end)
    if isinstance(reply, NoResponse) or reply.json is NOT_JSON:
        return None
    name = resolve(reply.json, parse(place.pointer))
    return name if isinstance(name, str) and name is not MISSING else None


@dataclass
class Trial:
    """Calls one server as a description says, and keeps each exchange."""

    endpoint: str
    description: Description
    secret: SecretLookup | None = None
    exchanges: list[ProbedExchange] = field(default_factory=list)
    _secrets: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._secrets.update(find_secrets_in_url(self.endpoint))
        self._server = ServerAdapter(self.endpoint, self.description, secret=self._look_up_secret)

    async def health(self, http: HttpClient) -> Health:
        """Request the server's health."""
        return await self._server.health(self._recording_send(http, "health"))

    async def run(self, http: HttpClient, payload: Any, patience_s: float) -> Outcome:
        """Run one job as a worker would, for at most `patience_s`; then cancel it."""
        call = Call(f"probe-{time.time_ns():x}", 1, payload, deadline_s=patience_s)
        end = time.monotonic() + patience_s
        outcome = await self._server.submit(call, self._recording_send(http, "submit"))
        remote_id = outcome.remote_id
        while outcome.kind is OutcomeKind.PENDING and remote_id and time.monotonic() < end:
            await asyncio.sleep(min(_POLL_S, max(end - time.monotonic(), 0)))
            outcome = await self._server.status(call, remote_id, self._recording_send(http, "status", remote_id))
        if outcome.kind in (OutcomeKind.PENDING, OutcomeKind.UNKNOWN) and self.description.cancel is not None:
            await self._server.cancel(call, remote_id, self._recording_send(http, "cancel", remote_id))
        return outcome

    def redacted(self, value: Any) -> str:
        """Return a value as a short text without secrets."""
        return redact(value if isinstance(value, str) else to_json(value).decode(), self._secrets)

    def _look_up_secret(self, name: str) -> str | None:
        value = self.secret(name) if self.secret else None
        if value:
            self._secrets.add(value)
        return value

    def _recording_send(self, http: HttpClient, first_step: str, remote_id: str | None = None) -> Send:
        """Return a function that sends the requests of a step and of the steps that follow it, and keeps them."""
        steps = _Steps(self.description, first_step)

        async def send(request: HttpRequest) -> Response | NoResponse:
            started = time.monotonic()
            reply = await http.send(*request).reply
            self.exchanges.append(self._make_exchange(request, reply, started, steps, remote_id))
            return reply

        return send

    def _make_exchange(
        self, request: HttpRequest, reply: Response | NoResponse, started: float, steps: "_Steps", remote_id: str | None
    ) -> ProbedExchange:
        path = request.url.partition("//")[2].partition("/")[2]
        step, rule, means = steps.judge(reply, remote_id)
        sent = None if request.body is None else self.redacted(request.body.decode("utf-8", "replace"))
        line = self.redacted(f"{request.method} /{path}")
        return _make_exchange(step, line, reply, started, sent=sent, rule=rule, means=means, secrets=self._secrets)


class _Steps:
    """Tracks the step of a description that is being run, and finds the rule that judges its response."""

    def __init__(self, description: Description, first_step: str) -> None:
        self._description, self._name, self._number = description, first_step, 0

    def judge(self, reply: Response | NoResponse, remote_id: str | None) -> tuple[str, str | None, str | None]:
        """Return the step's name, the matching rule as text, and its `then`; then advance to the next step."""
        place, own, defaults = self._rules()
        step = self._name
        rules = [*own, *defaults]
        number = next((i for i, one in enumerate(rules) if _holds(one, reply, remote_id)), None)
        if number is None:
            return step, None, None
        rule = rules[number]
        where = f"{place}.rules[{number}]" if number < len(own) else "default"
        self._advance(rule)
        return step, f"{where}: {_rule_as_json(rule)}", rule.then

    def _rules(self) -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
        """Return the place of the step in the description, its own rules, and the default rules."""
        description = self._description
        if self._name == "submit":
            return "submit", description.submit.rules, submit_rules(description.submit.id, description.mode == "async")
        if self._name == "status":
            return f"status[{self._number}]", description.status[self._number].rules, poll_rules()
        if self._name == "result" and description.result is not None:
            return "result", description.result.rules, result_rules()
        if self._name == "cancel" and description.cancel is not None:
            return f"cancel[{self._number}]", description.cancel[self._number].rules, cancel_rules()
        return "health", description.health.rules if description.health else (), health_rules()

    def _advance(self, rule: Rule | HealthRule) -> None:
        if self._name == "submit" and isinstance(rule, Rule) and rule.only_when_up:
            self._name = "health"
        elif self._name == "cancel" or (self._name == "status" and rule.then == "next"):
            self._number += 1
        elif self._name == "status" and rule.then == "done" and self._description.result is not None:
            self._name = "result"


def _holds(rule: Rule | HealthRule, reply: Response | NoResponse, remote_id: str | None) -> bool:
    compiled: CompiledRule = compile_rule(rule)
    return compiled.holds_for(reply, remote_id)


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
