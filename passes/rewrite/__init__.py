"""Rewrites: passes that change the graph and keep what the network computes."""
