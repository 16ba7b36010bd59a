"""Reading a health check: from a reply to a Health.  Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tasks.servers.call import Health, HealthKind
from tasks.servers.default_rules import health_rules
from tasks.servers.description import CountSource, HealthStep, StartSource
from tasks.servers.pointers import MISSING, Pointer, parse, resolve
from tasks.servers.responses import NOT_JSON, NoResponse, Response, id_text, redact
from tasks.servers.rules import CompiledRule, compile_rule, describe_unreadable, is_redirect

_IDLE = "idle"
_MAX_START_CHARS = 100  # characters
_MAX_ACTIVE = 1_000_000  # more than that is no count of jobs


class _NotAsDescribed(Exception):
    """The answer has something else where the number or the ids should stand."""


@dataclass(frozen=True, slots=True)
class HealthJudge:
    """How a server's health check is read."""

    rules: tuple[CompiledRule, ...]
    active: tuple[Pointer, ...]  # what stands there is summed up
    is_count: bool  # the pointers lead to lists, whose lengths count
    metrics: tuple[re.Pattern[str], ...]
    job_ids: tuple[Pointer, ...]
    job_ids_item: Pointer
    running: bool
    started: Pointer | re.Pattern[str] | None = None
    idempotent: Pointer | None = None

    def read(self, reply: Response | NoResponse, secrets: Iterable[str] = ()) -> Health:
        """Return what the server is, and what it says it is doing; without `secrets`, which its answer may repeat."""
        state = self._state(reply)
        kind = HealthKind.UP if state == _IDLE else HealthKind(state)
        message = redact(_message(reply), secrets)
        # A server that is busy by a rule of its own may still have answered in full (Cog does).
        if isinstance(reply, NoResponse) or not 200 <= reply.status < 300:
            return Health(kind, running_count=self.running, message=message)
        try:
            active, ids = self._active(reply), self._job_ids(reply)
        except _NotAsDescribed as error:
            return Health(HealthKind.GARBAGE, running_count=self.running, message=redact(str(error), secrets))
        if active is None and ids is not None:
            active = len(ids)
        return Health(
            kind,
            active,
            ids,
            running_count=self.running,
            is_idle=state == _IDLE,
            started=self._started(reply),
            idempotent=self._is_idempotent(reply),
        )

    def _state(self, reply: Response | NoResponse) -> str:
        return next((rule.then for rule in self.rules if rule.holds_for(reply, None)), HealthKind.GARBAGE.value)

    def _started(self, response: Response) -> str | None:
        if isinstance(self.started, re.Pattern):
            found = self.started.search(response.text)
            return found[1] if found else None
        value = None if self.started is None or response.json is NOT_JSON else resolve(response.json, self.started)
        return str(value)[:_MAX_START_CHARS] if isinstance(value, str | int | float) else None

    def _is_idempotent(self, response: Response) -> bool:
        if self.idempotent is None or response.json is NOT_JSON:
            return False
        return resolve(response.json, self.idempotent) is True

    def _active(self, response: Response) -> int | None:
        """Return how many jobs are there; None: a number is missing."""
        numbers = [_whole_number(_sum_of_metric(metric, response.text)) for metric in self.metrics]
        for pointer in self.active:
            value = self._at(response, pointer)
            numbers.append(_length(value) if self.is_count and value is not None else _whole_number(value))
        known = [number for number in numbers if number is not None]
        return sum(known) if known and len(known) == len(numbers) else None

    def _job_ids(self, response: Response) -> frozenset[str] | None:
        """Return the ids of all jobs that are there; None: a list is missing."""
        found: set[str] = set()
        for pointer in self.job_ids:
            value = self._at(response, pointer)
            if value is None:
                return None
            ids = [id_text(resolve(item, self.job_ids_item)) for item in value] if isinstance(value, list) else [None]
            if None in ids:
                raise _NotAsDescribed("the job ids are not a list of ids")
            found.update(job_id for job_id in ids if job_id is not None)
        return frozenset(found) if self.job_ids else None

    def _at(self, response: Response, pointer: Pointer) -> Any:
        if self.metrics and response.json is NOT_JSON:
            return None  # a page of metrics holds no ids
        if response.json is NOT_JSON:
            raise _NotAsDescribed(describe_unreadable(response))
        value = resolve(response.json, pointer)
        return None if value is MISSING else value


def _message(reply: Response | NoResponse) -> str:
    if isinstance(reply, NoResponse):
        return reply.message
    return describe_unreadable(reply) if is_redirect(reply) else f"the server answered {reply.status}"


def compile_health(step: HealthStep) -> HealthJudge:
    """A health step that has been checked, made fast."""
    active = step.active or CountSource.model_construct()
    return HealthJudge(
        rules=tuple(map(compile_rule, (*step.rules, *health_rules()))),
        active=tuple(map(parse, active.pointer or active.count)),
        is_count=bool(active.count),
        metrics=tuple(map(_metric_pattern, active.metric)),
        job_ids=tuple(map(parse, step.job_ids or ())),
        job_ids_item=parse(step.job_ids_item),
        running=step.running,
        started=_compile_start(step.started),
        idempotent=None if step.idempotent is None else parse(step.idempotent),
    )


def _compile_start(where: StartSource | None) -> Pointer | re.Pattern[str] | None:
    if where is None:
        return None
    return _metric_pattern(where.metric) if where.metric else parse(where.pointer or "")


def _metric_pattern(name: str) -> re.Pattern[str]:
    """A line of Prometheus text: name, labels perhaps, value."""
    return re.compile(rf"^{re.escape(name)}(?:\{{[^\n]*\}})?[ \t]+([0-9.eE+-]+)(?:[ \t]|\r?$)", re.MULTILINE)


def _sum_of_metric(sample: re.Pattern[str], text: str) -> float | None:
    found = sample.findall(text)
    try:
        return sum(map(float, found)) if found else None
    except ValueError:
        raise _NotAsDescribed("the metric is not a number") from None


def _length(value: Any) -> int:
    if not isinstance(value, list):
        raise _NotAsDescribed("what should be counted is not a list")
    return len(value)


def _whole_number(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _NotAsDescribed("the number of active jobs is not a number")
    if not 0 <= value <= _MAX_ACTIVE or value != int(value):
        raise _NotAsDescribed("the number of active jobs is not a count")
    return int(value)
