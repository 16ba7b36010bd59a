"""Validation of server descriptions in requests."""

from collections.abc import Callable, Mapping
from typing import Any

from app.context import dispatcher
from app.problems import ProblemError, printable_text
from tasks.servers import validation
from tasks.servers.validation import InvalidDescription


def validate_description(model: str, overrides: Mapping[str, Any]) -> str | None:
    """Return the description of a model's servers as JSON; None: `overrides` has no description and no preset.

    Raises ProblemError, whose `errors` name each place as a JSON pointer into the body.
    """
    return _validate(overrides, _make_rule_for_model(model), for_all=False)


def validate_description_for_all(overrides: Mapping[str, Any]) -> str | None:
    """As validate_description, for the defaults of models: only secrets for all models may be named."""
    return _validate(overrides, _make_rule_for_all(), for_all=True)


def _validate(overrides: Mapping[str, Any], may_use: Callable[[str], bool], *, for_all: bool) -> str | None:
    try:
        return validation.validate_description(overrides, may_use, for_all)
    except InvalidDescription as invalid:
        errors = [
            {
                "field": printable_text(fault.pointer.strip("/").replace("/", ".")),
                "pointer": printable_text(fault.pointer),
                "message": printable_text(fault.message),
            }
            for fault in invalid.faults
        ]
        facts = {"field": errors[0]["field"], "errors": errors}
        raise ProblemError(
            422, "invalid_description", "The description is not valid", printable_text(str(invalid)), **facts
        ) from None


def _make_rule_for_all() -> Callable[[str], bool]:
    """Return the rule which secrets the defaults of all models may use, by their name."""
    secrets = dispatcher().catalog.refresh().secrets
    return lambda name: name in secrets and secrets[name].models is None


def _make_rule_for_model(model: str) -> Callable[[str], bool]:
    """Return the rule which secrets a model may use, by their name."""
    secrets = dispatcher().catalog.refresh().secrets
    return lambda name: name in secrets and secrets[name].is_for(model)
