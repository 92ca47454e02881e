"""What a run would need and take on GPUs that are not there: compiled ahead of time, then read."""
