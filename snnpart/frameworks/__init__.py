"""Frameworks: everything snnpart knows of the libraries that spiking networks are built with.

The rest of snnpart sees only `Adapter` and the functions exported here. Each framework has one file, imported when a
model of that framework is met and never before.
"""

from snnpart.frameworks.adapter import Adapter
from snnpart.frameworks.clone import clone_leaf
from snnpart.frameworks.decode import decode_hooks, decode_leaf, leaf_packages
from snnpart.frameworks.encode import encode_hooks, encode_leaf
from snnpart.frameworks.registry import adapter_for, fit, hook_by_element, is_leaf, packages, tell_batch
from snnpart.frameworks.state import preserved, reset_state

__all__ = [
    "Adapter",
    "adapter_for",
    "clone_leaf",
    "decode_hooks",
    "decode_leaf",
    "encode_hooks",
    "encode_leaf",
    "hook_by_element",
    "is_leaf",
    "leaf_packages",
    "packages",
    "preserved",
    "reset_state",
    "fit",
    "tell_batch",
]
