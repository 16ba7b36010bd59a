"""A job's labels, from the submit to the list."""

from tests.support.api import Api


def test_labels_are_stored_and_returned_and_filter_the_list(api: Api) -> None:
    api.model()
    both = api.submit(labels={"team": "search", "run": "7"}).json["job_id"]
    other = api.submit(labels={"team": "Search"}).json["job_id"]
    plain = api.submit().json["job_id"]
    assert api.client.get(f"/queue/jobs/{both}").json["labels"] == {"run": "7", "team": "search"}
    assert api.client.get(f"/queue/jobs/{plain}").json["labels"] == {}

    def listed(query: str) -> list[str]:
        return [job["job_id"] for job in api.client.get(f"/queue/jobs?{query}").json["jobs"]]

    assert listed("label=team=search") == [both]
    assert listed("label=team=Search") == [other]
    assert listed("label=team=search&label=run=7") == [both]
    assert listed("label=team=search&label=run=8") == listed("label=team=sea") == []
    assert listed("") == [plain, other, both]


def test_wrong_labels_are_refused(api: Api) -> None:
    api.model()
    answer = api.submit(labels={"a b": "x"})
    assert (answer.status_code, answer.json["field"]) == (422, "labels")
    answer = api.client.get("/queue/jobs?label=team")
    assert (answer.status_code, answer.json["field"]) == (422, "label")


def test_an_idempotency_key_with_other_labels_is_a_conflict(api: Api) -> None:
    api.model()
    key = {"Idempotency-Key": "k"}
    first = api.submit(key, labels={"team": "search"}).json["job_id"]
    assert api.submit(key, labels={"team": "search"}).json["job_id"] == first
    assert api.submit(key, labels={"team": "ads"}).json["code"] == "idempotency_conflict"
