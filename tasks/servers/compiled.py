"""Compile a description: its templates, pointers and rules, once, before any call."""

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from tasks.servers import default_rules
from tasks.servers.description import (
    Callback,
    Cancel,
    Description,
    HealthRule,
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
_Judge = TypeVar("_Judge", Judge, HealthJudge)


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """The request of one step, compiled."""

    method: str
    path: PathTemplate | None  # None: the endpoint itself
    headers: HeaderTemplates | None
    body: BodyTemplate | None
    connect_s: float
    read_s: float


@dataclass(frozen=True)  # without slots, which generic dataclasses of Python 3.11 cannot have
class _StepOf(Generic[_Judge]):
    """The request of one step, and the judge of its response."""

    place: str  # in the description, such as "status[0]"
    request: RequestTemplate
    judge: _Judge
    rules: tuple[Rule | HealthRule, ...]  # those of the judge, as they are written
    own_rules: int  # so many of them are the description's own; default rules follow


CompiledStep: TypeAlias = _StepOf[Judge]
CompiledHealth: TypeAlias = _StepOf[HealthJudge]


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
    health: CompiledHealth | None
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
        submit=_compile_submit(d),
        stream=compile_stream(d.submit.stream, may_stay_pending=d.mode == "async") if d.submit.stream else None,
        status=tuple(
            _compile_step(d, f"status[{number}]", step, default_rules.poll_rules())
            for number, step in enumerate(d.status)
        ),
        result=_compile_step(d, "result", d.result, default_rules.result_rules()) if d.result else None,
        cancel=tuple(
            _compile_step(d, f"cancel[{number}]", step, default_rules.cancel_rules())
            for number, step in enumerate(d.cancel or ())
        ),
        callback=_make_poll_judge(d, d.callback, (*d.callback.rules, *default_rules.poll_rules())),
        health=_compile_health(d.health) if d.health else None,
        output_size=CompiledOutputSize(tuple(map(parse, d.output_size.pointer)), d.output_size.default)
        if d.output_size
        else None,
    )


def _compile_submit(description: Description) -> CompiledStep:
    step = description.submit
    rules = (*step.rules, *default_rules.submit_rules(step.id, description.mode == "async"))
    return CompiledStep(
        "submit", _compile_request(step), _make_submit_judge(description, rules), rules, len(step.rules)
    )


def _compile_step(
    description: Description, place: str, step: StatusStep | Result | Cancel, default_rules_of_step: tuple[Rule, ...]
) -> CompiledStep:
    rules = (*step.rules, *default_rules_of_step)
    judge = _make_poll_judge(description, step, rules)
    return CompiledStep(place, _compile_request(step), judge, rules, len(step.rules))


def _compile_health(step: HealthStep) -> CompiledHealth:
    rules = (*step.rules, *default_rules.health_rules())
    return CompiledHealth("health", _compile_request(step), compile_health(step, rules), rules, len(step.rules))


def _compile_request(step: _Step) -> RequestTemplate:
    return RequestTemplate(
        method=step.method,
        path=None if step.path is None else PathTemplate(step.path, step.sources),
        headers=HeaderTemplates(step.headers, step.sources) if step.headers else None,
        body=None if step.body is None else BodyTemplate(step.body, step.sources),
        connect_s=step.connect_s,
        read_s=float("inf") if step.read_s is None else step.read_s,
    )


def _make_submit_judge(description: Description, rules: tuple[Rule, ...]) -> Judge:
    return Judge(
        rules=tuple(map(compile_rule, rules)),
        is_poll=False,
        result=parse(description.submit.result),
        as_text=description.submit.result_as == "text",
        as_raw=description.submit.result_as == "raw",
        envelope=_parse_optional(description.submit.envelope),
        errors=error_pointers(description.submit.error),
        id=parse(description.submit.id),
        requires_id=description.mode != "callback",
        echo=None,  # the body names the server's id; only the header repeats the job's id
        echo_header=description.submit.echo,
    )


def _make_poll_judge(
    description: Description, step: StatusStep | Result | Cancel | Callback, rules: tuple[Rule, ...]
) -> Judge:
    return Judge(
        rules=tuple(map(compile_rule, rules)),
        is_poll=True,
        result=parse(step.result),
        as_text=step.result_as == "text",
        as_raw=step.result_as == "raw",
        envelope=_parse_optional(step.envelope),
        errors=error_pointers(step.error),
        id=parse(description.submit.id),
        requires_id=False,
        echo=parse(description.submit.id) if step.echo else None,
        echo_header=step.echo,
        progress=_parse_optional(step.progress) if isinstance(step, StatusStep) else None,
    )


def _parse_optional(pointer: str | None) -> Pointer | None:
    return None if pointer is None else parse(pointer)
