"""admission: what must hold before a job is written down.

    submission   what a client asked for, checked           admission    passes it through the gates
    gates        the bounds, one file each                  bounds       how many may wait
    placement    which servers could run it                 questions    what is asked of the room

Its scripts stand in lua/.  All but one change nothing: `enter` puts an accepted job into the room, and says where.
"""
