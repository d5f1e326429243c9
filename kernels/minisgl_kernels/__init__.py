"""The kernels of minisgl-batch. Each has a plain twin in `reference.py`, which runs where no kernel can."""
