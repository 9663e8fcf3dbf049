"""Kernels of the runtime, each with a reference in plain torch that defines what it computes."""
