"""The client of commands and of `slotkeeper up`, without a network."""

from typing import Any

from slotkeeper.client import Client
from tests.support.api import Api


class DirectClient:
    """Calls the views of an API fixture.  A request that is refused fails the test."""

    def __init__(self, api: Api) -> None:
        self._api = api

    iter_pages = Client.iter_pages

    def get(self, path: str, **params: Any) -> Any:
        return self.request("GET", path, params={name: value for name, value in params.items() if value is not None})

    def post(self, path: str, body: Any = None) -> Any:
        return self.request("POST", path, body=body)

    def request(self, method: str, path: str, *, body: Any = None, params: Any = None) -> Any:
        answer = self._api.client.open(path, method=method, json=body, query_string=params)
        assert answer.status_code < 300, answer.text
        return answer.json if answer.data else None
