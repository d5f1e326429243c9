"""The kernels of minisgl-batch. Each has a plain twin in `reference.py`, which is also what runs where no kernel can."""
