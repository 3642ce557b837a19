"""The lab: train, evaluate and compare encoders with the losses. The library itself never imports it."""
