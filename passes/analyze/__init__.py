"""Analyses: passes that write one fact each and change nothing else."""
