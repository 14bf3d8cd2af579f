"""k3lite: Kimi K3 as a small model that is exact in every formula."""

__version__ = "0.1.0"
