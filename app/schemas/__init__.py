"""Describes each request and response body once."""
