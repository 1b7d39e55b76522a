"""The table and the figure of `jit_profile.py`."""
