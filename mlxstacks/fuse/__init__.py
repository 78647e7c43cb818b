"""Stream a checkpoint through: base and deltas in, requantized shards and their fidelity out."""

import sys

from mlxstacks import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
