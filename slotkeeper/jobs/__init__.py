"""What a job is, and the only code that changes its state."""
