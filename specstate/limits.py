"""Upper bounds on every size that comes from outside.

None of them is a limit of the design. Behind them no length leaves int32 and no offset int64, and a damaged size is
refused where it is named, rather than by an allocator.
"""

MAX_LAYERS = 2**12
MAX_HEADS = 2**16
MAX_HEAD_DIM = 2**16
MAX_CONV_KERNEL_SIZE = 2**6
MAX_SLOTS = 2**20
"""Record slots, and checkpoint slots."""
MAX_QUERY_LEN = 2**16
MAX_RECORD_CAPACITY = 2**20
MAX_BLOCK_SIZE = 2**30
MIN_GATE_LOWER_BOUND = -1e6
"""e to this power is 0 in every dtype."""
MAX_STEP_SIZE = 2**20
"""Rows of a step, its tokens, and entries of caller-made counts, padding included."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
"""Between them float32 quotients of logits neither all vanish nor all overflow. 0 is greedy."""
MAX_CAPTURES = 2**12
"""Captured steps that a warmup makes room for."""
INT32_MAX = 2**31 - 1
MAX_GENERATION = INT32_MAX - MAX_SLOTS
"""Behind it no life begins any more; what one call may begin still has int32 numbers."""
INT64_MAX = 2**63 - 1
MAX_POSITION = INT32_MAX - MAX_CONV_KERNEL_SIZE
"""Tokens that a request may have, a window included: ring entries are counted from there in int32."""
MAX_COMMITTED_LEN = INT32_MAX - 2**16
"""At which a request may be loaded; what remains above it is room for windows."""
