"""The document says the truth: what it allows is taken, what it forbids is refused, and answers are as described.

SLOTKEEPER_TEST_EXAMPLES=50 pytest tests/nightly/api_fuzz/test_openapi_document.py     # more of each kind
"""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as HypothesisSettings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.failures import Failure, FailureGroup

from app.factory import create_app
from tests.support.api import Api
from tests.support.openapi_hooks import MODEL

_EXAMPLES = int(os.environ.get("SLOTKEEPER_TEST_EXAMPLES", "3"))
_SETTINGS = HypothesisSettings(
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(400)  # for a loaded machine
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(
    ("settings", "examples"),
    [({}, _EXAMPLES), ({"REQUIRE_KEYS": "true"}, 1)],  # Keys change who may send requests, not the requests.
    ids=["without keys", "with keys"],
)
def test_each_response_matches_the_openapi_document(
    api: Api, settings: dict[str, str], examples: int, mode: GenerationMode
) -> None:
    headers = api.tenant("boss", admin=True)
    answer = api.client.put(f"/admin/model-configs/{MODEL}", json={}, headers=headers)
    assert answer.status_code == 200, answer.text
    document = schemathesis.openapi.from_wsgi("/openapi.json", create_app())
    failed: list[str] = []
    for found in document.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
            continue

        @HypothesisSettings(_SETTINGS, max_examples=examples)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            case.call_and_validate(headers=headers)

        try:
            ask()
        except (FailureGroup, Failure) as error:  # All of them, not only the first.
            failed.append(f"{operation.label}: {error}")
        except Unsatisfiable:
            pass  # There is nothing that it forbids.
    assert not failed, "\n\n".join(failed)
