"""The protocol between a gateway and the agents that connect to it: HTTP requests over one WebSocket.

It has no input and output: both sides pass on what they receive, and send what it returns.  docs/reference/tunnel.md
describes the frames.
"""
