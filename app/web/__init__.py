"""app.web: the process `web`.  Takes connections and hands whole requests to the application.

Nothing that a client does, or leaves undone, holds a thread: a request reaches one when its last byte is here.  How
long each step may take, how much may be held, and who gives way when there is no room, is for this package to say;
what a request means is for `app.api`.

door.py        what all connections share
connection.py  one connection: heads, bodies, answers, and how long each may take
crowd.py       all connections, and the bytes that are held for each client; who gives way
owners.py      whose request it is, before it is read
hall.py        the threads, and the order in which clients get them
feed.py        what happens to jobs, read from the record once for all who follow it or wait
stream.py      one stream of events
places.py      places that are bounded for each owner
request.py     a request as it arrives          gateway.py  the same as WSGI has it, and the answer
"""
