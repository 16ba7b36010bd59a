"""app.server: the process `web`, an ASGI application on uvicorn.

application.py  takes a request, has Flask answer it in a thread, and keeps those that wait or follow events in the loop
connection.py   uvicorn's HTTP protocol, with deadlines and bounds for what a client sends and reads
threads.py      threads that the owners of requests get in turns       owners.py  whose request it is
wsgi.py         a request as WSGI has it, and Flask's response
feed.py         events, read once for all who follow them or wait      stream.py  the events of one client
"""
