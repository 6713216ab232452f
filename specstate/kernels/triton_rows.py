"""The columns of kernels/rows.py as constants that a Triton kernel may name."""

import triton.language as tl

from specstate.kernels import rows as at

CHECKPOINT_SLOT = tl.constexpr(at.CHECKPOINT_SLOT)
RECORD_ROW = tl.constexpr(at.RECORD_ROW)
FIRST_TOKEN = tl.constexpr(at.FIRST_TOKEN)
QUERY_LEN = tl.constexpr(at.QUERY_LEN)
GENERATION = tl.constexpr(at.GENERATION)
MIN_ACCEPTED = tl.constexpr(at.MIN_ACCEPTED)
BATCH_INDEX = tl.constexpr(at.BATCH_INDEX)
ROW_KIND = tl.constexpr(at.ROW_KIND)
BOUNDARY_SLOT = tl.constexpr(at.BOUNDARY_SLOT)
CHECKPOINT_LEN = tl.constexpr(at.CHECKPOINT_LEN)
PENDING_LEN = tl.constexpr(at.PENDING_LEN)
FOLD_LEN = tl.constexpr(at.FOLD_LEN)

STAGED_COLUMNS = tl.constexpr(at.STAGED_COLUMNS)
ROW_COLUMNS = tl.constexpr(at.ROW_COLUMNS)
DECODE = tl.constexpr(at.DECODE)
PROMPT = tl.constexpr(at.PROMPT)

CURSOR_CHECKPOINT_LEN = tl.constexpr(at.CURSOR_CHECKPOINT_LEN)
CURSOR_PENDING_LEN = tl.constexpr(at.CURSOR_PENDING_LEN)
CURSOR_GENERATION = tl.constexpr(at.CURSOR_GENERATION)
CURSOR_FINISHED = tl.constexpr(at.CURSOR_FINISHED)
CURSOR_SLOT = tl.constexpr(at.CURSOR_SLOT)
CURSOR_BOUNDARY_LEN = tl.constexpr(at.CURSOR_BOUNDARY_LEN)
CURSOR_COLUMNS = tl.constexpr(at.CURSOR_COLUMNS)

COUNT_CLAMPS = tl.constexpr(at.COUNT_CLAMPS)
COUNT_DROPPED = tl.constexpr(at.COUNT_DROPPED)
COUNT_WASTED = tl.constexpr(at.COUNT_WASTED)
COUNT_MISPLACED = tl.constexpr(at.COUNT_MISPLACED)
COUNT_WINDOWS = tl.constexpr(at.COUNT_WINDOWS)
COUNT_DRAFT_TOKENS = tl.constexpr(at.COUNT_DRAFT_TOKENS)
COUNT_FOLDS = tl.constexpr(at.COUNT_FOLDS)
COUNT_ACCEPTED = tl.constexpr(at.COUNT_ACCEPTED)

FOLD_AT_END = tl.constexpr(at.FOLD_AT_END)
FOLD_WHEN_FULL = tl.constexpr(at.FOLD_WHEN_FULL)
FOLD_BY_MASK = tl.constexpr(at.FOLD_BY_MASK)
FOLD_AT_BOUNDARY = tl.constexpr(at.FOLD_AT_BOUNDARY)
FOLD_IN_VERIFY = tl.constexpr(at.FOLD_IN_VERIFY)
FOLD_BY_FLUSH = tl.constexpr(at.FOLD_BY_FLUSH)

PLAN_SOURCE = tl.constexpr(at.PLAN_SOURCE)
PLAN_DESTINATION = tl.constexpr(at.PLAN_DESTINATION)
PLAN_RECORD_ROW = tl.constexpr(at.PLAN_RECORD_ROW)
PLAN_CHECKPOINT_LEN = tl.constexpr(at.PLAN_CHECKPOINT_LEN)
PLAN_COUNT = tl.constexpr(at.PLAN_COUNT)
PLAN_BOUNDARY_SLOT = tl.constexpr(at.PLAN_BOUNDARY_SLOT)
PLAN_BOUNDARY_COUNT = tl.constexpr(at.PLAN_BOUNDARY_COUNT)
PLAN_COLUMNS = tl.constexpr(at.PLAN_COLUMNS)
