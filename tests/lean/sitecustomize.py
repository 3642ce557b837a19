"""Read by every Python program that a test starts: it searches for garbage less often, and not at its end.

What a program imports stays, about a million objects with torch and Fabric. Searching them while they are imported
and once more at the end takes a third of the time of a short program.
"""

import atexit
import gc

gc.set_threshold(50_000)
atexit.register(gc.freeze)
