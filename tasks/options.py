"""Reads the arguments and options of a call of `infer`: by delay, apply_async, a canvas or a bare client's message.

No argument or option is ignored silently: it has its effect, or it is refused by name with a sentence that says what to
do instead.  Options that only concern the sending of a message are accepted without effect.
"""

import inspect
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

from routing.admission.job_request import REQUEST_FIELDS, JobRequest
from routing.admission.submission import Submission
from slotkeeper.errors import InvalidJob
from slotkeeper.registry.identity import Identity
from tasks import offer_messages

_MAX_TENANT_CHARS = 200
_MAX_ENVELOPE_BYTES = 1 << 20
_EARLIER_RESULT_HINT = (
    'Earlier results come first in a chain: write infer.s(model="…") for the result to become the payload, '
    'infer.si("…", {…}) to leave it out, or put a task of your own between them that makes the payload'
)
_MODEL_OR_PAYLOAD = "its model or payload; let a task of your own make the payload, or leave what comes earlier out"

_POSITIONAL = tuple(name for name, given in REQUEST_FIELDS.items() if given.celery == "argument")
_REQUEST_FIELDS = frozenset(name for name, given in REQUEST_FIELDS.items() if given.celery is not None)
_HEADER_FIELDS = frozenset({"tenant", "idempotency_key", "traceparent"})  # a REST request has these in its headers
_ARGUMENTS = _REQUEST_FIELDS | _HEADER_FIELDS
_SHARED_NAMES = _ARGUMENTS - {"model", "payload"}  # options of apply_async as well as arguments of the task
_CELERY_OPTIONS = frozenset(
    {"countdown", "eta", "expires", "ignore_result", "link", "link_error", "priority", "task_id"}
)
# A canvas sets these in its parts.
_CANVAS_OPTIONS = frozenset({"chain", "chord", "group_id", "group_index", "parent_id", "root_id", "stamped_headers"})
# They concern the sending of a message.  No message is sent: the job is in the database before the call returns.
_IGNORED_OPTIONS = frozenset(
    {"add_to_parent", "connection", "producer", "publisher", "replaced_task_nesting", "reply_to"}
)
_ACCEPTED_DEFAULTS = {"queue": ("celery",), "retries": (0,), "serializer": ("json",)}
_ROUTING_HINT = (
    "a job waits in the queue of its model; constraints say which servers may run it, priority how urgent it is"
)
_LIMITS_HINT = "a run is limited by its model's max_poll_time, a job's life by expires"
_PUBLISHING_HINT = "no message is published: the job is in the record before the call returns"
_REFUSED_OPTIONS = {
    **dict.fromkeys(("queue", "exchange", "exchange_type", "routing_key", "router", "route_name"), _ROUTING_HINT),
    **dict.fromkeys(("time_limit", "soft_time_limit"), _LIMITS_HINT),
    **dict.fromkeys(("retry", "retry_policy", "delivery_mode", "mandatory", "immediate", "headers"), _PUBLISHING_HINT),
    **dict.fromkeys(("serializer", "compression"), "a payload is a JSON object, and stored as one"),
    "cancel_when_gone": "a Celery client waits at the result backend, which nobody sees; use expires",
    "rate_limit": "a model runs as many jobs as it has slots, and a tenant as many as tenant_slots lets it hold",
    "max_retries": "retries are bounded by max_retries of the model's configuration",
    "retries": "retries are counted in the record",
    "shadow": "a job is known as infer, and by its id",
}


def infer(model: str, payload: dict[str, Any] | None = None, callback_url: str | None = None, **options: Any) -> Any:
    """Submit a job: `infer.delay(model, payload)`; its result is that of the inference server.

        infer.delay("zimg", {"prompt": "a sunset"}).get(timeout=60)
        infer.apply_async(("zimg", {"prompt": "soon"}), priority=1, expires=60, constraints={"gpu": "A100"})

    `callback_url`, `constraints`, `labels`, `tenant`, `idempotency_key` and `traceparent` (by default the environment's
    TRACEPARENT) may be given as arguments, or as options of apply_async and of signatures,
    `infer.s(…).set(tenant="acme")`.  Further options: `priority` (1 most urgent … 9),
    `countdown`, `eta`, `expires`, `task_id` (the job's id), `link`, `link_error`, `ignore_result`.  Any other is
    refused.  In a chain `infer.s(model="flux")` takes the earlier result as its payload.

    The call returns when the job is in the database.  AsyncResult.status is PENDING until the job has ended, then
    SUCCESS, FAILURE (tasks.JobFailed: code, message) or REVOKED; `revoke()` cancels the job.  Raises
    slotkeeper.errors.InvalidJob (its `field` names what is wrong), UnknownModel, TooManyRequests, Conflict,
    IdempotencyConflict, InsufficientCredits, DatabaseUnavailable.
    """


def signature() -> inspect.Signature:
    """Return the signature of `infer`, with all its arguments."""
    parameter, names = inspect.Parameter, sorted(_ARGUMENTS.difference(_POSITIONAL))
    positional = [
        parameter(name, parameter.POSITIONAL_OR_KEYWORD, default=parameter.empty if name == "model" else None)
        for name in _POSITIONAL
    ]
    return inspect.Signature([*positional, *(parameter(name, parameter.KEYWORD_ONLY, default=None) for name in names)])


def read_submission(
    job_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any], sender: Identity
) -> Submission:
    """Return the submission that a call describes.  Raises InvalidJob."""
    given = {name: value for name, value in options.items() if value is not None}
    _check_options(given)
    _check_successors(given)
    arguments = _read_arguments(args, kwargs) | _read_shared_arguments(kwargs, given)
    ttl_s, expires_ms = _read_time("expires", given.get("expires"))
    delay_s, not_before_ms = _read_time("eta", given.get("eta"))
    if given.get("countdown"):
        delay_s, not_before_ms = given["countdown"], None
    requested = {name: value for name, value in arguments.items() if name in _REQUEST_FIELDS}
    header_fields = {name: value for name, value in arguments.items() if name in _HEADER_FIELDS}
    tenant = header_fields["tenant"] = sender.tenant_of_job(header_fields.get("tenant"))
    key_owner = sender.tenant.name if sender.key_id is not None and sender.tenant.name != tenant else None
    return Submission(
        # model_construct: `prepare_job` validates the values.
        JobRequest.model_construct(**requested, priority=given.get("priority"), ttl=ttl_s, not_before=delay_s),
        id=job_id,
        expires_ms=expires_ms,
        not_before_ms=not_before_ms,
        source="task",
        envelope=_envelope({**given, "key_id": sender.key_id, "key_owner": key_owner}),
        **header_fields,
    )


# -- options ---------------------------------------------------------------------------------------------------


def _check_options(given: Mapping[str, Any]) -> None:
    valid = _SHARED_NAMES | _CELERY_OPTIONS | _CANVAS_OPTIONS | _IGNORED_OPTIONS | set(_stamped_headers(given))
    for name in given.keys() - valid:
        if given[name] in _ACCEPTED_DEFAULTS.get(name, ()):
            continue
        if name in _REFUSED_OPTIONS:
            raise InvalidJob(name, f"{name} means nothing to a job: {_REFUSED_OPTIONS[name]}")
        raise InvalidJob(name, f"{name} is no option of infer{_suggestion(name, _SHARED_NAMES | _CELERY_OPTIONS)}")


def _stamped_headers(given: Mapping[str, Any]) -> Sequence[str]:
    return given.get("stamped_headers") or ()


def _suggestion(name: str, valid: frozenset[str]) -> str:
    nearest = get_close_matches(name, sorted(valid), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else f"; it takes {', '.join(sorted(valid))}"


def _envelope(given: Mapping[str, Any]) -> str:
    """Return, as JSON, which signatures and which task the job's end concerns.  Raises InvalidJob."""
    stored = {
        **given,
        "callbacks": _signatures(given.get("link")),
        "errbacks": _signatures(given.get("link_error")),
        "stamps": {name: given.get(name) for name in _stamped_headers(given)} or None,
    }
    try:
        envelope = offer_messages.pack_envelope(stored)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJob("link", f"what follows the job cannot be kept as JSON: {error}") from None
    if len(envelope) > _MAX_ENVELOPE_BYTES:
        raise InvalidJob("link", f"what follows the job takes {len(envelope)} bytes, {_MAX_ENVELOPE_BYTES} may be kept")
    return envelope


def _signatures(link: Any) -> list[Any] | None:
    if not link:
        return None
    return list(link) if isinstance(link, list | tuple) else [link]


# -- signatures that run after the job -------------------------------------------------------------------------


def _check_successors(given: Mapping[str, Any]) -> None:
    """Refuse a signature of `infer` that could only fail after this job has run."""
    for field in ("link", "chain"):
        for step in _signatures(given.get(field)) or ():
            if _takes_earlier_result(step) and (step.get("args") or not (step.get("kwargs") or {}).get("model")):
                raise InvalidJob(
                    field, f"{field}: the infer after this job would get its result as a model. {_EARLIER_RESULT_HINT}"
                )
    if any(map(_takes_earlier_result, _signatures(given.get("link_error")) or ())):
        raise InvalidJob("link_error", f"link_error: infer would get this job's id as {_MODEL_OR_PAYLOAD}, infer.si(…)")
    if _takes_earlier_result(given.get("chord")):
        raise InvalidJob(
            "chord", f"chord: its body infer would get a list of results as {_MODEL_OR_PAYLOAD}, infer.si(…)"
        )


def _takes_earlier_result(step: Any) -> bool:
    """Return whether this is a signature of `infer` that gets the earlier result as an argument."""
    return isinstance(step, Mapping) and step.get("task") == offer_messages.TASK and not step.get("immutable")


# -- arguments -------------------------------------------------------------------------------------------------


def _read_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return model, payload and callback_url, which are given by position or by name.  Raises InvalidJob."""
    for name in kwargs.keys() - _ARGUMENTS:
        raise InvalidJob(str(name), f"{name} is no argument of infer{_suggestion(str(name), _ARGUMENTS)}")
    # In a chain the earlier result is the first argument.  If the model is given by name, that is the payload.
    positions = _POSITIONAL[1:] if "model" in kwargs else _POSITIONAL
    if len(args) > len(positions):
        raise InvalidJob(
            "args", f"infer takes {', '.join(positions)}, and was given {len(args)} arguments. {_EARLIER_RESULT_HINT}"
        )
    found = dict(zip(positions, args, strict=False))
    for name in found.keys() & kwargs.keys():
        raise InvalidJob(name, f"{name} is given twice, by position and by name")
    found |= {name: kwargs[name] for name in _POSITIONAL if name in kwargs}
    if not isinstance(found.get("model"), str):
        raise InvalidJob("model", _not_a_model(found.get("model")))
    if found.get("payload") is None:
        found["payload"] = {}
    if not isinstance(found["payload"], dict):
        raise InvalidJob(
            "payload", f"payload must be a JSON object and is {_json_kind(found['payload'])}. {_EARLIER_RESULT_HINT}"
        )
    return found


def _not_a_model(found: Any) -> str:
    if found is None:
        return "infer needs a model: infer.delay(model, payload)"
    return f"the model must be named by a text and is {_json_kind(found)}. {_EARLIER_RESULT_HINT}"


def _json_kind(value: Any) -> str:
    kinds = {"dict": "an object", "list": "a list", "tuple": "a list", "str": "a text"}
    return kinds.get(type(value).__name__, f"a {type(value).__name__}")


def _read_shared_arguments(kwargs: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that may be given as an argument or as an option.  Raises InvalidJob."""
    found = {}
    for name in sorted(_SHARED_NAMES):
        if kwargs.get(name) is not None and name in given and kwargs[name] != given[name]:
            raise InvalidJob(name, f"{name} is given twice, as an argument and as an option")
        value = given.get(name, kwargs.get(name))
        if value is not None:
            found[name] = value
    _check_strings(found)
    return found


def _check_strings(found: Mapping[str, Any]) -> None:
    for name in {"callback_url", "idempotency_key", "tenant", "traceparent"} & found.keys():
        if not isinstance(found[name], str):
            raise InvalidJob(name, f"{name} must be a text and is {_json_kind(found[name])}")
    tenant = found.get("tenant", "default")
    if not 1 <= len(tenant) <= _MAX_TENANT_CHARS or not tenant.isprintable():
        raise InvalidJob("tenant", f"tenant must be 1 to {_MAX_TENANT_CHARS} printable characters")


def _read_time(field: str, when: Any) -> tuple[float | None, int | None]:
    """Return a time as seconds from now, or as a moment in ms: in the form in which it was given.

    So a repeated call is the same request.  Celery gives times as seconds, as datetimes, and in messages as ISO texts.
    Raises InvalidJob.
    """
    if when is None or (isinstance(when, int | float) and not isinstance(when, bool)):
        return when, None
    try:
        if isinstance(when, str):
            when = datetime.fromisoformat(when)
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        return None, round(when.timestamp() * 1000)
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise InvalidJob(field, f"{field} must be a number of seconds, or a date and time") from None
