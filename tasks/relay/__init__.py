"""The process `relay`: publishes all events to each sink, in order."""
