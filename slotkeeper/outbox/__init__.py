"""What the database owes others: events for sinks, webhook messages, notifications of Celery's clients."""
