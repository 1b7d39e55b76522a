"""What a run keeps: checkpoints, its record, and where it resumes."""
