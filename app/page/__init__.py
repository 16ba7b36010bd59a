"""The HTML page at `/`.  It is rendered on the server, works without scripts, and calls API views as functions.

To add a screen: its view with `@page_view`, its template, and its row in `layout.NAVIGATION`.
"""
