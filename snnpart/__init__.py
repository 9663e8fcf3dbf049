"""snnpart: a compiler for spiking neural networks."""

__version__ = "0.1.0"
