"""What people see of a run: its record, progress, tables, figures and the written report."""

COLOURS = {"reuse": "#9CCEA7", "adapt": "#FEB24C", "new": "#9EC9E2", "skip": "#F2ACCA"}
"""One colour per op kind, in terminal, figures and report alike."""
