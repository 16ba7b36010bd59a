"""The process `gateway`: agents of nodes connect to it, and workers reach nodes through it.

    node_side.py     WebSockets of agents: challenge, hello, presence
    worker_side.py   HTTP of workers: POST /n/<node>/<number>/run
    connection.py    one agent's connection, and the requests that travel over it
    connections.py   all of them, and what Redis and the catalog know of them

docs/reference/tunnel.md describes what travels between gateway and agent.
"""
