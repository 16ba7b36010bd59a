"""Prove that no job gets lost and none runs twice at once (`make drill`).

A drill starts a cluster, submits jobs, injects faults by a printed seed, and then compares the answers that clients got
with what servers and webhook receivers recorded.
"""
