"""The process `webhooks`: it sends signed messages to the URLs of tenants and jobs."""
