"""Runs of a study as processes of this machine or as jobs of SLURM."""
