"""Hides torchmetrics from programs that tests start.

Fabric imports torchmetrics to compare its version, and torchmetrics imports transformers and much of scipy, which
takes seconds. None of these programs needs it, and ``weince[runs]`` does not install it.
"""

raise ImportError("the tests leave torchmetrics out of the programs that they start")
