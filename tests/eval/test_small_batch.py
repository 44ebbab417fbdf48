"""The tasks and trainings of small batches: copies, equal passes, a loss of one's own."""
