"""The secret of the installation, the keys and secrets under it, and the URLs that strangers may name."""
