"""Each error has a unique stable code and a title, and states whether to try again."""

import inspect

from slotkeeper import errors
from slotkeeper.errors import Conflict, DatabaseUnavailable, InvalidJob, SlotkeeperError, TooManyRequests

ALL = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, SlotkeeperError) and found is not SlotkeeperError
]


def test_every_error_has_a_unique_code():
    """InvalidJob is the exception: clients see it as an invalid request."""
    codes = [error.code for error in ALL if error is not InvalidJob]
    assert len(codes) == len(set(codes)) > 5
    assert "error" not in codes


def test_every_error_has_a_title_of_one_sentence():
    assert all(error.__doc__.endswith(".") and "\n" not in error.__doc__ for error in ALL)


def test_an_error_carries_its_facts():
    error = Conflict("It is so.", job_id="j")
    assert (str(error), error.detail, error.facts) == ("It is so.", "It is so.", {"job_id": "j"})


def test_an_invalid_job_names_the_field():
    assert InvalidJob("priority", "must be 1 to 9").facts == {"field": "priority"}


def test_an_error_that_may_be_retried_names_the_retry_time():
    assert DatabaseUnavailable("gone").retry_after_s > 0
    assert TooManyRequests("full", 1.5).retry_after_s == 1.5
    assert Conflict("no").retry_after_s is None
