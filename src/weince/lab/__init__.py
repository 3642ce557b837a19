"""The laboratory: train, evaluate and compare encoders with the losses. The library imports nothing of it."""
