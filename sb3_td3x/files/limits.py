"""
All limits for files that are not trusted.

They keep a small file from taking a lot of memory. A file may still take as much memory and time as its size justifies.
"""

# Total size of a zip file's members: the larger of this many bytes and this multiple of the file's size
MAX_UNCOMPRESSED_BYTES = 16 * 2**20
MAX_COMPRESSION_RATIO = 4

# Memory for the objects that a pickle describes, as a multiple of the pickle's size
MAX_PICKLE_GROWTH = 64

# `config.yml` and `args.yml` in the folder of a run. Values that refer to each other can stand for exponentially many,
# and the time for nested lists grows with the square of their number
MAX_YAML_BYTES = 2**15
MAX_YAML_ALIASES = 20
MAX_YAML_BRACKETS = 1000

# `vecnormalize.pkl` in the folder of a run
MAX_STATISTICS_BYTES = 64 * 2**20
