"""Answer questions about jobs, models, servers and processes, for the API, the page and metrics."""
