"""Compile a description: its templates, pointers and rules, once, before any call."""

from dataclasses import dataclass

from tasks.servers import default_rules
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
from tasks.servers.pointers import Pointer, parse
from tasks.servers.rules import HealthJudge, Judge, compile_health, compile_rule, error_pointers
from tasks.servers.stream_reader import StreamPlan, compile_stream
from tasks.servers.templates import BodyTemplate, CompiledOutputSize, HeaderTemplates, PathTemplate

_Step = Submit | StatusStep | Result | Cancel | HealthStep


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """The request of one step, compiled."""

    method: str
    path: PathTemplate | None  # None: the endpoint itself
    headers: HeaderTemplates | None
    body: BodyTemplate | None
    connect_s: float
    read_s: float


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """The request of one step, and the judge of its response."""

    request: RequestTemplate
    judge: Judge


@dataclass(frozen=True, slots=True)
class CompiledDescription:
    """A whole description, compiled."""

    description: Description
    submit: CompiledStep
    stream: StreamPlan | None  # of the response to the submit
    status: tuple[CompiledStep, ...]
    result: CompiledStep | None
    cancel: tuple[CompiledStep, ...]
    callback: Judge
    health: tuple[RequestTemplate, HealthJudge] | None
    output_size: CompiledOutputSize | None

    @property
    def pointers(self) -> frozenset[Pointer]:
        """Return the places that its steps read in responses."""
        steps = [self.submit, *self.status, *self.cancel, *([self.result] if self.result else [])]
        return frozenset[Pointer]().union(*(step.judge.pointers for step in steps))


def compile_description(description: Description) -> CompiledDescription:
    """Compile a description.  This takes a fraction of a millisecond: keep the result for all calls."""
    d = description
    return CompiledDescription(
        description=d,
        submit=CompiledStep(_compile_request(d.submit), _make_submit_judge(d)),
        stream=compile_stream(d.submit.stream) if d.submit.stream else None,
        status=tuple(_compile_step(d, step, default_rules.poll_rules()) for step in d.status),
        result=_compile_step(d, d.result, default_rules.result_rules()) if d.result else None,
        cancel=tuple(_compile_step(d, step, default_rules.cancel_rules()) for step in d.cancel or ()),
        callback=_make_poll_judge(d, d.callback, default_rules.poll_rules()),
        health=(_compile_request(d.health), compile_health(d.health)) if d.health else None,
        output_size=CompiledOutputSize(tuple(map(parse, d.output_size.pointer)), d.output_size.default)
        if d.output_size
        else None,
    )


def _compile_step(
    description: Description, step: StatusStep | Result | Cancel, default_rules_of_step: tuple[Rule, ...]
) -> CompiledStep:
    return CompiledStep(_compile_request(step), _make_poll_judge(description, step, default_rules_of_step))


def _compile_request(step: _Step) -> RequestTemplate:
    return RequestTemplate(
        method=step.method,
        path=None if step.path is None else PathTemplate(step.path, step.sources),
        headers=HeaderTemplates(step.headers, step.sources) if step.headers else None,
        body=None if step.body is None else BodyTemplate(step.body, step.sources),
        connect_s=step.connect_s,
        read_s=float("inf") if step.read_s is None else step.read_s,
    )


def _make_submit_judge(description: Description) -> Judge:
    rules = (*description.submit.rules, *default_rules.submit_rules(description.submit.id, description.mode == "async"))
    return Judge(
        rules=tuple(map(compile_rule, rules)),
        is_poll=False,
        result=parse(description.submit.result),
        as_text=description.submit.result_as == "text",
        errors=error_pointers(description.submit.error),
        id=parse(description.submit.id),
        requires_id=description.mode != "callback",
        echo=None,  # the body names the server's id; only the header repeats the job's id
        echo_header=description.submit.echo,
    )


def _make_poll_judge(
    description: Description, step: StatusStep | Result | Cancel | Callback, default_rules_of_step: tuple[Rule, ...]
) -> Judge:
    return Judge(
        rules=tuple(map(compile_rule, (*step.rules, *default_rules_of_step))),
        is_poll=True,
        result=parse(step.result),
        as_text=step.result_as == "text",
        errors=error_pointers(step.error),
        id=parse(description.submit.id),
        requires_id=False,
        echo=parse(description.submit.id) if step.echo else None,
        echo_header=step.echo,
        progress=parse(step.progress) if isinstance(step, StatusStep) and step.progress is not None else None,
    )
