"""Guards of the product, each taken out once: with any of them gone, a test must fail."""
