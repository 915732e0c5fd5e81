"""Files on disk: agents and replay buffers, written as a whole and read without running code."""
