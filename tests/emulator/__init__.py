"""Parts of the Metal emulator; `tests/metal_emulator.py` is its face.

text: MLX's Metal text of a kernel. unit: that text as C++. metal_*.h: Metal's library for C++.
compiler, library: objects. cache: the folder they are kept in. runtime*: fibers, barriers, faults.
memory, arrays: guarded buffers and what is in them. launch: one run. variants: the ways to run.
small, planted: for the emulator's own tests. lint: what only Metal's compiler would refuse.
"""
