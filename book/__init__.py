"""The course outside of JupyterLab: a static site (build.py) and the explorers alone (apps.py)."""
