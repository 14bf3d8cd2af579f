"""Settings for every test."""

import os

# Before anything imports triton: its kernels then run on the CPU (see k3lite/ops/kda_triton.py).
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch  # noqa: E402

torch.set_num_threads(1)  # the tensors here are small: more threads only wait for each other
