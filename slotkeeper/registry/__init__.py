"""Models, servers, tenants, and how servers are called."""
