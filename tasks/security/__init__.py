"""The installation's secret, the keys derived from it, sealed secrets, and checks of untrusted URLs."""
