"""snnpart: a compiler for spiking neural networks."""
