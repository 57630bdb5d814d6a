"""One GPU memory pool for every library in the process."""
