"""Request and response bodies, each described once."""
