"""Asks a gateway whether a node answers there.  Apart, because few processes need `requests`."""

import requests

from tasks.node_addresses import gateway_headers


def ping_node(address: str, node: str, timeout_s: float) -> int | None:
    """Return the status with which a gateway says whether a node answers: 200 or 404; None: no gateway answers."""
    try:
        return requests.get(f"{address}/ping/{node}", headers=gateway_headers(), timeout=timeout_s).status_code
    except requests.RequestException:
        return None
