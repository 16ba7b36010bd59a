"""Validations: jobs with known answers that find servers which answer wrongly."""

from typing import Any

from app.api.openapi import blueprint, problem_responses, response_of
from app.auth.access import current_tenant
from app.context import dispatcher
from app.schemas.validation_schemas import (
    ServerAnswersView,
    ValidationBody,
    ValidationList,
    ValidationPath,
    ValidationReport,
    ValidationView,
)
from routing.admission.submission import encode_payload
from slotkeeper.clock import now_ms
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.validations import Validation
from tasks.services import validations

api = blueprint("validations", "Validations", "/admin/validations", scope=Scope.OPERATE)


@api.get("", responses={200: ValidationList})
def list_validations() -> dict[str, Any]:
    """List the validations."""
    return ValidationList.build(validations=[ValidationView.build(one) for one in validations().list_all()])


@api.get("/report", responses={200: ValidationReport})
def report_validations() -> dict[str, Any]:
    """Show the latest answers of each server: right, wrong, without a result."""
    return ValidationReport.build(servers=[ServerAnswersView.build(one) for one in validations().read_answers({})])


@api.put(
    "/<name>",
    responses={200: ValidationView, 201: response_of(ValidationView, "New"), **problem_responses(400, 413, 415, 422)},
)
def set_validation(path: ValidationPath, body: ValidationBody) -> tuple[dict[str, Any], int]:
    """Add or replace a validation.

    Its job is submitted about every `every_s` seconds as the tenant `validation`; no tenant pays for it, and for a
    server it is like any other job.  A server that is often wrong is drained, but never the last one of a model.
    """
    model = dispatcher().catalog.resolve(body.model)
    encode_payload(body.payload, model.config.max_payload_bytes)
    known = {one.name for one in validations().list_all()}
    new = Validation(
        path.name,
        body.model,
        body.payload,
        body.expected,
        body.every_s,
        body.compare,
        body.tolerance,
        body.enabled,
        current_tenant().name,
        now_ms(),
    )
    validations().set(new)
    return ValidationView.build(new), 200 if path.name in known else 201


@api.delete("/<name>", responses={204: None, **problem_responses(404, 415)})
def remove_validation(path: ValidationPath) -> tuple[str, int]:
    """Remove a validation.  Its answers still count."""
    validations().remove(path.name)
    return "", 204
