"""Attacks on a running Slotkeeper: for each, what must be true before, during and after it.

frame.py     what an attack is, and how one is played
stage.py     the processes that are attacked, and who is there
api.py       the attacks on the REST API; each other door gets a module like it, listed in ALL below
table.py     all doors: what may be tried at each, and the attacks and tests that try it
card.py      the score card

`make test` plays the quick ones and runs the tests, `make attack` plays all of them and prints the table, too.
"""
