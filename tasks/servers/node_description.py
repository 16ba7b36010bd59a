"""How workers call a node, through a gateway: a description that its endpoints have, and no model can choose."""

import tomllib
from functools import cache
from pathlib import Path

from tasks.servers.description import Description

REFUSED_BY_NODE = "refused_by_node"
"""Code of an outcome: the node says that the request is wrong."""


@cache
def node_description() -> str:
    """Return the description as JSON."""
    text = (Path(__file__).parent / "node.toml").read_text()
    return Description.model_validate(tomllib.loads(text)).model_dump_json()
