"""Attacks on a running Slotkeeper, each with conditions that must hold before, during and after it.

frame.py     the class of an attack, and the function that plays it
harness.py   the attacked processes, and the keys of their clients
api.py       the attacks on the REST API; each other attack surface gets a module like this one, listed in ALL below
table.py     all attack surfaces: possible attempts on each, and the attacks and tests that make them
card.py      the score card

`make test` plays the quick ones and runs the tests, `make attack` plays all of them and prints the table, too.
"""
