"""How servers are spoken to, checked at the door where it is given."""

from collections.abc import Callable, Mapping
from typing import Any

from app.context import dispatcher
from app.problems import ProblemError, printable_text
from tasks.servers import validation
from tasks.servers.validation import InvalidDescription


def validate_description(model: str, given: Mapping[str, Any]) -> str | None:
    """The description that is meant, as JSON; None: nothing is said of it.

    Raises ProblemError, whose `errors` name each place as a JSON pointer into the body.
    """
    return _validate(given, _make_rule_for_model(model), for_all=False)


def validate_description_for_all(given: Mapping[str, Any]) -> str | None:
    """The same for any model: only secrets that are for all of them can be put in."""
    return _validate(given, _make_rule_for_all(), for_all=True)


def _validate(given: Mapping[str, Any], may_use: Callable[[str], bool], *, for_all: bool) -> str | None:
    try:
        return validation.validate_description(given, may_use, for_all)
    except InvalidDescription as unfit:
        errors = [
            {
                "field": printable_text(it.pointer.strip("/").replace("/", ".")),
                "pointer": printable_text(it.pointer),
                "message": printable_text(it.message),
            }
            for it in unfit.faults
        ]
        facts = {"field": errors[0]["field"], "errors": errors}
        raise ProblemError(
            422, "invalid_description", "The description is not valid", printable_text(str(unfit)), **facts
        ) from None


def _make_rule_for_all() -> Callable[[str], bool]:
    secrets = dispatcher().catalog.refresh().secrets
    return lambda name: name in secrets and secrets[name].models is None


def _make_rule_for_model(model: str) -> Callable[[str], bool]:
    secrets = dispatcher().catalog.refresh().secrets
    return lambda name: name in secrets and secrets[name].is_for(model)
