"""The process `webhooks`: sends signed messages to the webhooks of tenants and the callback URLs of jobs."""
