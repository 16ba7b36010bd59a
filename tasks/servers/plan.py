"""A description made ready for use: templates, pointers and rules compiled once, before any call."""

from dataclasses import dataclass

from tasks.servers import defaults
from tasks.servers.description import (
    Callback,
    Cancel,
    Description,
    HealthStep,
    Result,
    Rule,
    StatusStep,
    Submit,
)
from tasks.servers.health import HealthJudge, health_judge
from tasks.servers.pointers import Pointer, parse
from tasks.servers.rules import Judge, compile_rule, error_pointers
from tasks.servers.stream import StreamPlan, compile_stream
from tasks.servers.templates import Body, Headers, OutputSize, Path

_Step = Submit | StatusStep | Result | Cancel | HealthStep


@dataclass(frozen=True, slots=True)
class Request:
    """How to ask, in one step."""

    method: str
    path: Path | None  # None: the endpoint itself
    headers: Headers | None
    body: Body | None
    connect_s: float
    read_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """How to ask, and how to read the answer."""

    request: Request
    judge: Judge


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole description, compiled."""

    description: Description
    submit: Step
    stream: StreamPlan | None  # of the submit's answer
    status: tuple[Step, ...]
    result: Step | None
    cancel: Step | None
    callback: Judge
    health: tuple[Request, HealthJudge] | None
    output_size: OutputSize | None

    @property
    def pointers(self) -> frozenset[Pointer]:
        """Where its steps look in answers."""
        steps = [self.submit, *self.status, *(it for it in (self.result, self.cancel) if it is not None)]
        return frozenset[Pointer]().union(*(step.judge.pointers for step in steps))


def compile_plan(description: Description) -> Plan:
    """Takes a fraction of a millisecond; keep it as long as the description stays the same."""
    d = description
    return Plan(
        description=d,
        submit=Step(_request(d.submit), _submit_judge(d)),
        stream=compile_stream(d.submit.stream) if d.submit.stream else None,
        status=tuple(Step(_request(s), _poll_judge(d, s, defaults.poll_rules())) for s in d.status),
        result=_optional(d, d.result, defaults.result_rules()),
        cancel=_optional(d, d.cancel, defaults.cancel_rules()),
        callback=_poll_judge(d, d.callback, defaults.poll_rules()),
        health=(_request(d.health), health_judge(d.health)) if d.health else None,
        output_size=OutputSize(tuple(map(parse, d.output_size.pointer)), d.output_size.default)
        if d.output_size
        else None,
    )


def _optional(d: Description, step: Result | Cancel | None, more: tuple[Rule, ...]) -> Step | None:
    return Step(_request(step), _poll_judge(d, step, more)) if step else None


def _request(step: _Step) -> Request:
    return Request(
        method=step.method,
        path=None if step.path is None else Path(step.path, step.sources),
        headers=Headers(step.headers, step.sources) if step.headers else None,
        body=None if step.body is None else Body(step.body, step.sources),
        connect_s=step.connect_s,
        read_s=float("inf") if step.read_s is None else step.read_s,
    )


def _submit_judge(d: Description) -> Judge:
    rules = (*d.submit.rules, *defaults.submit_rules(d.submit.id, d.mode == "async"))
    return Judge(
        rules=tuple(map(compile_rule, rules)),
        is_poll=False,
        result=parse(d.submit.result),
        as_text=d.submit.result_as == "text",
        errors=error_pointers(d.submit.error),
        id=parse(d.submit.id),
        requires_id=d.mode != "callback",
        echo=None,  # the id in the answer is the server's own; only the header repeats ours
        echo_header=d.submit.echo,
    )


def _poll_judge(d: Description, step: StatusStep | Result | Cancel | Callback, more: tuple[Rule, ...]) -> Judge:
    return Judge(
        rules=tuple(map(compile_rule, (*step.rules, *more))),
        is_poll=True,
        result=parse(step.result),
        as_text=step.result_as == "text",
        errors=error_pointers(step.error),
        id=parse(d.submit.id),
        requires_id=False,
        echo=parse(d.submit.id) if step.echo else None,
        echo_header=step.echo,
        progress=parse(step.progress) if isinstance(step, StatusStep) and step.progress is not None else None,
    )
