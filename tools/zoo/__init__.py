"""Equivalents, written anew and small, of public spiking networks that are hard to partition.

Each keeps the traits that make its original hard, and none of its code. `catalogue` lists them, `check` compares a
compiled one with one process, `run.py` does so for all and writes docs/results/zoo.csv.
"""
