"""The training loop's parts; train.py puts them together."""
