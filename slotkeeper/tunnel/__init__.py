"""The protocol between a gateway and the agents that connect to it: HTTP requests over one WebSocket.

`frames` and `streams` have no input and output: both sides pass on what they receive, and `sender` sends what they
return.  docs/reference/tunnel.md describes the frames.
"""
