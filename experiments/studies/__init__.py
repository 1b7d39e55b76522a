"""The parts of every study, and its tests; the commands are one folder up."""
