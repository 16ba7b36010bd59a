"""Pending notifications of others: events for sinks, webhook messages, results for Celery's clients."""
