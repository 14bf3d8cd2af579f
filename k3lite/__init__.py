"""k3lite: Kimi K3 as a small model that is exact in every formula."""

import os

# How long an idle OpenMP thread spins before it sleeps. With the default (30 times longer), two threads on cores that
# have other work too were up to 180 times slower at small tensors: 12.9 s for a question that takes 0.1 s. On idle
# cores a training step takes the same 0.256 s either way. Must be set before torch is loaded; other OpenMPs ignore it.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"
