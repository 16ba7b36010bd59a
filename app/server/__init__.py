"""The process `web`: an ASGI application on uvicorn that calls Flask in threads."""
