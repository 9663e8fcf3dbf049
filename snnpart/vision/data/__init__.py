"""Data for training, evaluation and prediction: sources, the order of samples, batches, early checks."""
