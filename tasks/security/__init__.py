"""The installation's secret, the keys and secrets under it, and the URLs that strangers may name."""
