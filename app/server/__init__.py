"""The process `web`: an ASGI application on uvicorn, which has Flask answer requests in threads."""
