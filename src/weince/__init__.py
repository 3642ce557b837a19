"""A contrastive loss whose tail you can check."""
