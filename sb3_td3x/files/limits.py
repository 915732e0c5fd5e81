"""
All limits for files that are not trusted.

They keep a small file from taking a lot of memory. A file may still take as much memory and time as its size justifies.
"""

# Total size of a zip file's members: this many bytes, or this multiple of the file's size
MAX_UNCOMPRESSED_BYTES = 16 * 2**20
MAX_COMPRESSION_RATIO = 20

# Attributes of an agent, as JSON or as a pickle; `trusted=True` lifts this one
MAX_ATTRIBUTE_BYTES = 16 * 2**20

# Memory for the objects that a pickle describes, as a multiple of the pickle's size
MAX_PICKLE_GROWTH = 64
