"""SimCLR on images: data, augmentation, encoders and the training loop."""
