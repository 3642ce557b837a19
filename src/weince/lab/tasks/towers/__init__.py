"""Two towers: queries and documents, or images and captions, embedded side by side and found by exact search."""
