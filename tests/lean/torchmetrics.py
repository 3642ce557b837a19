"""Stands in the way of torchmetrics in programs that tests start.

Fabric imports it, and it imports transformers and half of scipy, seconds in all, to compare its version. None of
these programs needs it, nor does ``weince[runs]`` bring it.
"""

raise ImportError("the tests leave torchmetrics out of the programs that they start")
