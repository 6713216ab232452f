"""The int32 tables that host and kernels share: a step's row records, and the cursors and sampling parameters of the
record slots.

The first two hold lengths and slots, never addresses. A row record is a step's own copy, one line a row, so a step can
be ended late whatever happened to the batch meanwhile. A cursor belongs to a record slot, and within steps to one
writer: the cursor kernel (``advance`` in the reference).

Positions are the ring cursors. The record of the token at position p lies in ring entry p mod R, its conv input in
ring entry (p + W - 1) mod (W - 1 + T). So a ring has no start of its own that could drift from the lengths, and a
window that is verified again after a cancel overwrites exactly what it wrote before.

        checkpoint_len            committed_len                committed_len + query_len
    ---------|--- pending_len records --|------- the window's records ------|
"""

# Columns of a row record, int32 [rows, ROW_COLUMNS]. The first STAGED_COLUMNS come from the host in one copy, the
# others are read from the cursors by `refresh`.
CHECKPOINT_SLOT = 0  # 0: the null slot
RECORD_ROW = 1  # -1: the scratch row
FIRST_TOKEN = 2  # offset of the window in the flat token dimension
QUERY_LEN = 3
GENERATION = 4  # of the request that the row was made for
MIN_ACCEPTED = 5
BATCH_INDEX = 6  # entry of caller-made counts and masks
ROW_KIND = 7
BOUNDARY_SLOT = 8  # the owner's slot for its next boundary checkpoint; 0: none; -1: its block table is not to be used
STAGED_COLUMNS = 9
CHECKPOINT_LEN = 9
PENDING_LEN = 10
FOLD_LEN = 11  # pending records that this step's verify folds: 0, or all of them
ROW_COLUMNS = 12

# Values of ROW_KIND.
DECODE, PROMPT, DUMMY = 0, 1, 2

# Columns of the cursor table, int32 [record rows, CURSOR_COLUMNS].
CURSOR_CHECKPOINT_LEN = 0
CURSOR_PENDING_LEN = 1
CURSOR_GENERATION = 2  # of the owner; 0: nobody's
CURSOR_FINISHED = 3  # 1 once an end token was committed
CURSOR_SLOT = 4  # where the running checkpoint lies; a caller's block table moves it
CURSOR_BOUNDARY_LEN = 5  # position of the checkpoint in the owner's boundary slot; 0: it holds none
CURSOR_COLUMNS = 6

#: End tokens that a request may have; the device table is this wide.
MAX_END_TOKENS = 8

# Columns of the sampling table, int32 [record rows, SAMPLING_COLUMNS]: the parameters given at admit.
TEMPERATURE = 0  # bits of a float32; 0.0: greedy
TOP_P = 1  # bits of a float32
TOP_K = 2  # 0: all
SEED_LOW = 3
SEED_HIGH = 4
END_TOKENS = 5  # MAX_END_TOKENS of them, -1 where unused
SAMPLING_COLUMNS = END_TOKENS + MAX_END_TOKENS

# What a random number is for: a word of its counter.
DRAW_TARGET = 0  # the target's own token
DRAW_ACCEPT = 1  # whether a draft with probabilities stands
DRAW_RESIDUAL = 2  # the token in place of a draft that does not

# Entries of the device counters, int64 [COUNT_ACCEPTED + max_query_len + 1].
COUNT_CLAMPS = 0  # accepted counts that lay outside [min_accepted, query_len]
COUNT_DROPPED = 1  # row ends that met another generation
COUNT_WASTED = 2  # windows verified after their request had finished
COUNT_MISPLACED = 3  # rows whose position by the caller's account was not the cursor's
COUNT_WINDOWS = 4  # decode windows that ended
COUNT_DRAFT_TOKENS = 5
COUNT_FOLDS = 6  # rows folded, an entry a reason
FOLD_AT_END, FOLD_WHEN_FULL, FOLD_BY_MASK, FOLD_AT_BOUNDARY, FOLD_IN_VERIFY, FOLD_BY_FLUSH = range(6)
COUNT_ACCEPTED = 12  # decode windows with drafts, an entry for each accepted count 0 .. max_query_len

# Columns of a fold plan, int32 [rows, PLAN_COLUMNS]: what the cursor kernel hands to the fold.
PLAN_SOURCE = 0  # checkpoint slot that is read
PLAN_DESTINATION = 1  # checkpoint slot that is written; may be the source
PLAN_RECORD_ROW = 2
PLAN_CHECKPOINT_LEN = 3  # position of the source
PLAN_COUNT = 4  # records to fold into the destination; 0: it is left alone
PLAN_BOUNDARY_SLOT = 5  # checkpoint slot that gets the state after PLAN_BOUNDARY_COUNT records; 0: none
PLAN_BOUNDARY_COUNT = 6
PLAN_COLUMNS = 7
