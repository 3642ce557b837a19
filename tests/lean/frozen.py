"""Imported last by the fork server: programs that fork from it do not search what it has imported for garbage.

A search writes to every object, so each program would copy all of the server's memory.
"""

import gc

gc.collect()
gc.freeze()
