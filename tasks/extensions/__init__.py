"""Celery's documented extension points: pool, consumer, transport, boot steps, remote control, signals."""
