"""The HTML pages at `/`.  They are rendered on the server, work without scripts, and call API views as functions.

To add a page, write its view with `@page_view` and its template, and add an entry to `layout.NAVIGATION`.
"""
