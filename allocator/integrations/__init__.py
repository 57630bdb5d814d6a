"""One package or module a library: how each of them gets its memory from a pool.

Rule: no policy here.  An integration finds out which stream is meant, says whether uses are declared, and calls the
pool; everything else is the pool's.  The libraries themselves are imported only by the integration that needs them.

Next: cupy/.
"""
