"""One gradient step, for any networks."""
