"""The process `relay`: it publishes all events to each sink, in order."""
