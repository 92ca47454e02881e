"""fp4zoo: train language models in 4 bits with JAX and Flax NNX."""

__version__ = "0.1.0"
