"""A mutation check of the guards: python -m tests.mutations [WORD ...]

Removes guards of the rules of ownership (docs/rules.md) one at a time, in a copy of the package that is thrown away,
and runs the tests that must notice. Prints a line for each and exits 1 when a mutant survives: then a rule has no test.
A WORD picks the mutations whose line has it. What breaks at run time stands in test_replay.py; here it is the source.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300


@dataclass(frozen=True)
class Mutation:
    """A guard, and what is left of it: ``text`` stands exactly once in ``file``."""

    rule: int
    guard: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    """Arguments of pytest: of these tests at least one must fail."""

    def __str__(self) -> str:
        return f"rule {self.rule:2}, {self.guard} ({self.file})"


def refusals(words: str) -> tuple[str, ...]:
    return ("tests/test_refusals.py", "-k", words)


def manager(words: str) -> tuple[str, ...]:
    return ("tests/test_manager.py", "-k", words)


def preemption(words: str) -> tuple[str, ...]:
    return ("tests/test_preemption.py", "-k", words)


def trace(*names: str) -> tuple[str, ...]:
    """Golden traces that replay no more."""
    words = " or ".join(f"reference and {name}" for name in names)
    return ("tests/test_replay.py", "-k", f"golden_traces_replay and ({words})")


def lifecycle(who: str) -> tuple[str, ...]:
    """Without a search for the shortest example, which takes minutes."""
    return ("tests/test_lifecycle.py", "--hypothesis-profile", "unshrunk", "-k", who)


def triton(file: str, words: str) -> tuple[str, ...]:
    return (f"tests/kernels/test_triton_{file}.py", "-k", words)


def choice(words: str) -> tuple[str, ...]:
    return ("tests/kernels/test_choice.py", "-k", words)


MUTATIONS = (
    # -- rule 1: one owner
    Mutation(
        1, "an end compares generations", "specstate/kernels/cursors.py",
        " & (cursor[:, at.CURSOR_GENERATION] == rows[:, at.GENERATION])", "",
        manager("another_generation_is_dropped"),
    ),
    Mutation(
        1, "a handle is of its generation", "specstate/requests.py",
        "if request.handle != handle:", "if False:",
        refusals("another and generation"),
    ),
    Mutation(
        1, "a release nulls the row of an open step", "specstate/manager/core.py",
        "request.open_step.null_request(request)", "pass",
        manager("release_in_an_open_step"),
    ),
    Mutation(
        1, "a preempted request leaves its open step", "specstate/manager/core.py",
        "        self._leave_step(request)\n        known = ", "        known = ",
        preemption("late_end_of_the_first_life"),
    ),
    Mutation(
        1, "a parked record slot is nobody's", "specstate/backends/tensors.py",
        "cursor[at.CURSOR_GENERATION].zero_()", "pass",
        preemption("preempted_request_resumes and records"),
    ),
    Mutation(
        1, "a resumed request has another generation", "specstate/manager/lives.py",
        "self._backend.unpark(record_slot, handle.generation)", "pass",
        preemption("preempted_request_resumes and records"),
    ),
    Mutation(
        1, "the id of a preempted request is taken", "specstate/ledger.py",
        "if request_id in self.preempted:", "if False:",
        preemption("ids_that_are_taken"),
    ),
    Mutation(
        1, "a nulled row has no record row", "specstate/kernels/cursors.py",
        "columns[at.RECORD_ROW].fill_(-1)", "pass",
        manager("release_in_an_open_step"),
    ),
    Mutation(
        1, "a late row writes no cursor", "specstate/kernels/cursors.py",
        "torch.where(owned, value, cursor[:, column])", "value",
        manager("another_generation_is_dropped"),
    ),
    Mutation(
        1, "a late row folds nothing", "specstate/kernels/cursors.py",
        "count = torch.where(owned & due, pending, 0)", "count = torch.where(due, pending, 0)",
        manager("another_generation_is_dropped"),
    ),
    Mutation(
        1, "Triton: a late row writes no cursor", "specstate/kernels/triton_cursor.py",
        "tl.store(p_cursor + CURSOR_CHECKPOINT_LEN, checkpoint_len + folded, mask=owned)",
        "tl.store(p_cursor + CURSOR_CHECKPOINT_LEN, checkpoint_len + folded)",
        triton("cursor", "late_end"),
    ),
    Mutation(
        1, "Hopper: a verify waits for the end of a row", "specstate/kernels/hopper.py",
        "self._last = None\n        super().null_row(step, row)", "super().null_row(step, row)",
        choice("changes_its_rows and null_row"),
    ),
    # -- rule 2: pending records
    Mutation(
        2, "new parameters wait for a flush", "specstate/manager/core.py",
        "            if request.may_be_pending:", "            if False:",
        refusals("set_params and pending"),
    ),
    Mutation(
        2, "new parameters wait for the preempted, too", "specstate/manager/core.py",
        "            if preempted.may_be_pending:", "            if False:",
        preemption("behind_a_fence"),
    ),
    Mutation(
        2, "a fence folds what the preempted have pending", "specstate/manager/core.py",
        "self._fold_owners(owners)", "pass",
        preemption("behind_a_fence"),
    ),
    Mutation(
        2, "a fork takes pending records along", "specstate/backends/tensors.py",
        "plan[:, at.PLAN_CHECKPOINT_LEN], plan[:, count] = start, pending",
        "plan[:, at.PLAN_CHECKPOINT_LEN], plan[:, count] = start, 0",
        preemption("a_fork_stands"),
    ),
    Mutation(
        2, "a fork stands behind the pending records", "specstate/backends/tensors.py",
        "cursor[at.CURSOR_CHECKPOINT_LEN] += cursor[at.CURSOR_PENDING_LEN]", "pass",
        preemption("a_fork_stands"),
    ),
    Mutation(
        2, "a retraction folds first", "specstate/manager/core.py",
        "            self._fold_home(request)\n        payload = ", "            pass\n        payload = ",
        preemption("preempted_request_resumes and host"),
    ),
    Mutation(
        2, "what verify folded is pending no more", "specstate/kernels/cursors.py",
        "pending = before + accepted - checkpoint_len",
        "pending = cursor[:, at.CURSOR_PENDING_LEN] + accepted",
        manager("deferred_folds_in_the_next_verify"),
    ),
    Mutation(
        2, "a ring folds before the next window might not fit", "specstate/kernels/cursors.py",
        "full = pending + config.max_query_len > config.record_capacity", "full = pending > config.record_capacity",
        manager("ring_folds_when"),
    ),
    Mutation(
        2, "records of an own kernel come after a flush", "specstate/step.py",
        "if not self._flushed:", "if False:",
        refusals("write_records and pending"),
    ),
    Mutation(
        2, "Hopper: a fold has room for every record", "specstate/kernels/hopper_constants.py",
        "1 << (config.record_capacity - 1).bit_length()", "1 << config.record_capacity.bit_length() - 1",
        choice("room_for_every_record"),
    ),
    Mutation(
        2, "Hopper: a verify waits for what a flush leaves", "specstate/kernels/hopper.py",
        "self._last = None\n        super().refresh(step)", "super().refresh(step)",
        choice("changes_its_rows and refresh"),
    ),
    # -- rule 3: verify reads, and writes records
    Mutation(
        3, "debug compares what a verify wrote", "specstate/backends/guard.py",
        "if not torch.equal(bits(before[slot]), bits(after[slot])):", "if False:",
        manager("verify_that_writes_elsewhere"),
    ),
    Mutation(
        3, "an out lies outside of the storage", "specstate/backends/tensors.py",
        "if self.storage.meets_span(start, end):", "if False:",
        refusals("out and record_u"),
    ),
    Mutation(
        3, "Hopper: a verify waits for another step's", "specstate/kernels/hopper.py",
        "self._last is not None and self._last[0] is step and", "self._last is not None and",
        choice("changes_its_rows and another_step"),
    ),
    # -- rule 4: a row that owns nothing does nothing
    Mutation(
        4, "slot 0 and record row -1 are nobody's", "specstate/kernels/cursors.py",
        "(rows[:, at.CHECKPOINT_SLOT] > 0) & (rows[:, at.RECORD_ROW] >= 0)", "rows[:, at.RECORD_ROW] >= -1",
        manager("padding_changes_nothing"),
    ),
    Mutation(
        4, "padding reads zero", "specstate/kernels/reference.py",
        "torch.where(places.answered, o[window.token_offset, window.token_row], 0.0)",
        "o[window.token_offset, window.token_row]",
        manager("padding_changes_nothing"),
    ),
    Mutation(
        4, "Triton: a verify for nobody reads zero", "specstate/kernels/triton_verify.py",
        "(record_row < 0):\n        for t in range(query_len):", "(record_row < 0):\n        for t in range(0):",
        triton("verify", "padding_dummies_and_poison"),
    ),
    # -- rule 5: counts in range
    Mutation(
        5, "counts are clamped", "specstate/kernels/cursors.py",
        "torch.minimum(torch.maximum(counts, rows[:, at.MIN_ACCEPTED]), rows[:, at.QUERY_LEN])", "counts",
        manager("counts_are_clamped"),
    ),
    Mutation(
        5, "debug refuses counts out of range", "specstate/integrity.py",
        "if not least <= counts[row] <= query_len:", "if False:",
        refusals("debug_refuses_counts"),
    ),
    Mutation(
        5, "Triton: counts are clamped", "specstate/kernels/triton_cursor.py",
        "tl.minimum(tl.maximum(count, tl.load(p_row + MIN_ACCEPTED)), query_len)", "count",
        triton("cursor", "absurd_counts"),
    ),
    Mutation(
        5, "a finished request accepts nothing", "specstate/kernels/cursors.py",
        "running = owned & ~was_finished", "running = owned",
        manager("windows_after_the_end_token"),
    ),
    Mutation(
        5, "a prompt row goes on after an end token", "specstate/kernels/cursors.py",
        " & (rows[:, at.ROW_KIND] != at.PROMPT)", "",
        ("tests/test_sampling.py",),
    ),
    # -- rule 6: what is published, and what lies at a boundary, is exact
    Mutation(
        6, "a boundary is a multiple of block_size", "specstate/kernels/cursors.py",
        "boundary = (before + accepted) // config.block_size * config.block_size", "boundary = before + accepted",
        trace("class06_boundaries"),
    ),
    Mutation(
        6, "only what was accepted reaches a boundary", "specstate/kernels/cursors.py",
        "crosses = owned & (boundary > before)", "crosses = owned & (boundary > 0)",
        trace("class06_boundaries"),
    ),
    Mutation(
        6, "a row that crosses a boundary folds", "specstate/kernels/cursors.py",
        "at.FOLD_AT_BOUNDARY: (boundary_slots > 0) | (destinations != slots),",
        "at.FOLD_AT_BOUNDARY: torch.zeros_like(owned),",
        trace("class06_boundaries_deferred", "class06_boundaries_ring"),
    ),
    Mutation(
        6, "a boundary is not written over the running checkpoint", "specstate/kernels/cursors.py",
        "((bound != destinations) | (after % block_size == 0))", "(bound >= 0)",
        trace("class06_block_tables"),
    ),
    Mutation(
        6, "behind the last block no boundary is kept", "specstate/kernels/cursors.py",
        "apart = (column - 1 <= last) & ", "apart = ",
        trace("class06_block_tables"),
    ),
    Mutation(
        6, "a misplaced line is not used", "specstate/kernels/cursors.py",
        "usable = crosses & (rows[:, at.BOUNDARY_SLOT] == 0)", "usable = crosses",
        trace("class06_block_tables"),
    ),
    Mutation(
        6, "without payloads, a misplaced line is not used", "specstate/backends/metadata.py",
        "for slot in table[entry] if placed]", "for slot in table[entry]]",
        ("tests/test_replay.py", "-k", "without_payloads"),
    ),
    Mutation(
        6, "a running checkpoint moves", "specstate/kernels/cursors.py",
        "(at.CURSOR_SLOT, destinations),", "(at.CURSOR_SLOT, slots),",
        trace("class06_block_tables"),
    ),
    Mutation(
        6, "what is folded comes home from a block", "specstate/manager/core.py",
        "self._fold_all([request])\n        if request.moved:", "self._fold_all([request])\n        if False:",
        trace("class06_block_tables"),
    ),
    Mutation(
        6, "a look does not decide when a slot is taken", "specstate/manager/looking.py",
        "request.overcounted = request.most_committed - committed_len", "request.stands_at(committed_len)",
        trace("class06_block_tables"),
    ),
    Mutation(
        6, "a position that nobody holds is not published", "specstate/manager/publishing.py",
        "if not at_boundary and position not in (checkpoint_len, cursor.committed_len):", "if False:",
        lifecycle("WithBoundaries"),
    ),
    Mutation(
        6, "a boundary is not handed over in an open step", "specstate/manager/publishing.py",
        "if at_boundary and request.open_step is None:", "if at_boundary:",
        trace("class07_publication"),
    ),
    Mutation(
        6, "nothing is published between verifies", "specstate/manager/publishing.py",
        'self._refuse_between_verifies("publish", request)', "pass",
        lifecycle("WithBoundaries"),
    ),
    Mutation(
        6, "a load leaves no boundary", "specstate/backends/tensors.py",
        "for column in (at.CURSOR_PENDING_LEN, at.CURSOR_FINISHED, at.CURSOR_BOUNDARY_LEN):",
        "for column in (at.CURSOR_PENDING_LEN, at.CURSOR_FINISHED):",
        lifecycle("WithBoundaries"),
    ),
    Mutation(
        6, "a prefix in use is not evicted", "specstate/prefixes.py",
        "        self._idle.pop(prefix.key, None)\n        self._used[prefix.key] = prefix\n", "",
        trace("class07_eviction"),
    ),
    Mutation(
        6, "a hit does not evict what it hits", "specstate/ledger.py",
        "- (spared is not None and not spared.num_users)", "",
        lifecycle("test_lifecycle"),
    ),
    Mutation(
        6, "a preempted request uses its prefix still", "specstate/manager/core.py",
        "            **known,\n", '            **(known | {"restored_from": None}),\n',
        trace("class07_publication"),
    ),
    Mutation(
        6, "Triton: only what was accepted reaches a boundary", "specstate/kernels/triton_cursor.py",
        "boundary_slot = tl.where(crosses, given, 0)", "boundary_slot = tl.where(owned, given, 0)",
        triton("lifecycle", "golden_traces and class06_boundaries_ring"),
    ),
    Mutation(
        6, "Triton: a running checkpoint moves", "specstate/kernels/triton_cursor.py",
        "tl.store(p_cursor + CURSOR_SLOT, destination, mask=owned)",
        "tl.store(p_cursor + CURSOR_SLOT, source, mask=owned)",
        triton("lifecycle", "golden_traces and class06_loads_in_place_deferred"),
    ),
    # -- rule 7: conv and recurrent state at one position
    Mutation(
        7, "a restored request's conv ring is its checkpoint's", "specstate/backends/tensors.py",
        "        self._fill_ring(record_row, cursor[at.CURSOR_CHECKPOINT_LEN :][:1])\n", "",
        preemption("preempted_request_resumes and host"),
    ),
    Mutation(
        7, "integrity compares conv histories", "specstate/backends/tensors.py",
        "if not torch.equal(bits(ring), bits(layer.conv[checkpoint_slot])):", "if False:",
        manager("integrity_finds_a_conv_history"),
    ),
    # -- rule 8: addresses
    Mutation(
        8, "Triton: an address table knows its storage", "specstate/kernels/table.py",
        "if now != then:", "if False:",
        triton("layouts", "replaced_storage"),
    ),
    Mutation(
        8, "Hopper: vectors of a state start where they may", "specstate/kernels/supported.py",
        "if layer.recurrent.data_ptr() % 16 or stride % 16:", "if stride % 16:",
        choice("storage_is_refused"),
    ),
    Mutation(
        8, "Hopper: slots of a state lie where they may", "specstate/kernels/supported.py",
        "if layer.recurrent.data_ptr() % 16 or stride % 16:", "if layer.recurrent.data_ptr() % 16:",
        choice("storage_is_refused"),
    ),
    Mutation(
        8, "Hopper: kernels that do not serve allocate nothing", "specstate/kernels/supported.py",
        'if config.path == "hopper":', "if False:",
        choice("before_anything_is_allocated"),
    ),
    Mutation(
        8, "a pinned path is not exchanged", "specstate/kernels/choice.py",
        'config.path == "hopper" or (config.path is None and', "(config.path is None and",
        choice("test_the_choice"),
    ),
    Mutation(
        8, "another storage has a path of its own", "specstate/backends/tensors.py",
        "self._storage, self._kernels, self.path = storage, kernels, kernels.path",
        "self._storage, self._kernels = storage, kernels",
        choice("storage_may_change"),
    ),
    # -- rule 9: slots are conserved
    Mutation(
        9, "a free slot is not freed again", "specstate/slots.py",
        "if slot not in self._taken:", "if False:",
        ("tests/test_slots.py",),
    ),
    Mutation(
        9, "no slot, no admit", "specstate/ledger.py",
        "if records > self.record_slots.num_free or checkpoints > self.checkpoint_slots.num_free + evictable:",
        "if False:",
        refusals("without_a_free_slot"),
    ),
    Mutation(
        9, "a folded request gives its record slot back", "specstate/manager/core.py",
        "record_slot=None if fold else record_slot,", "record_slot=record_slot,",
        preemption("preempted_request_resumes and checkpoint"),
    ),
    Mutation(
        9, "a resume that fails gives back what it took", "specstate/ledger.py",
        "            for slot in reversed(checkpoint_slots):\n                self.checkpoint_slots.free(slot)\n", "",
        preemption("gives_back_what_it_took"),
    ),
    Mutation(
        9, "integrity counts the slots of the preempted", "specstate/ledger.py",
        "owned += [(p.record_slot, p.checkpoint_slot) for p in self.preempted]", "pass",
        preemption("integrity_finds"),
    ),
    Mutation(
        9, "a preemption that keeps records keeps the boundary", "specstate/ledger.py",
        "if owner.boundary_slot and (keeper is None or not keeper.boundary_slot):", "if owner.boundary_slot:",
        trace("class06_boundaries"),
    ),
    Mutation(
        9, "a slot with a running checkpoint is not taken back", "specstate/manager/publishing.py",
        "            if slot in slots:\n", "            if False:\n",
        ("tests/test_replay.py", "-k", "make_reproduces"),
    ),
    Mutation(
        9, "only reserved slots are taken back", "specstate/ledger.py",
        "if type(slot) is not int or slot not in self.lent:", "if type(slot) is not int:",
        lifecycle("test_lifecycle"),
    ),
    Mutation(
        9, "integrity counts the users of a prefix", "specstate/ledger.py",
        "        if owner.restored_from is not None:\n            self.prefixes.leave(owner.restored_from)\n", "",
        trace("class07_publication", "class07_eviction"),
    ),
    # -- rule 11: one open step a request
    Mutation(
        11, "a request in an open step begins no other", "specstate/batch.py",
        "if request.open_step is not None:", "if False:",
        refusals("begin_step and open"),
    ),
    Mutation(
        11, "a step ends once", "specstate/step.py",
        "if self._ended_by is not None:", "if False:",
        refusals("committed and commit"),
    ),
    Mutation(
        11, "a step names a request once", "specstate/batch.py",
        "if row_of.setdefault(handle.request_id, row) != row:", "if False:",
        refusals("request and twice"),
    ),
    # -- rule 12: how a step ends, and what may come in between
    Mutation(
        12, "a layer verifies once", "specstate/step.py",
        "if self._verified[layer]:", "if False:",
        refusals("again"),
    ),
    Mutation(
        12, "a step ends when all layers have verified", "specstate/step.py",
        "if not all(self._verified):", "if False:",
        refusals("commit and one and layer"),
    ),
    Mutation(
        12, "no flush between verifies", "specstate/manager/stepping.py",
        'self._refuse_between_verifies("flush", request)', "pass",
        refusals("manager.flush"),
    ),
    Mutation(
        12, "no read between verifies", "specstate/manager/looking.py",
        'self._refuse_between_verifies("read", request)', "pass",
        refusals("read and one and layer"),
    ),
    *(
        Mutation(
            12, f"no {verb} between verifies", "specstate/manager/lives.py",
            f'self._refuse_between_verifies("{verb}", {who})', "pass",
            preemption(f"between_verifies and {verb}"),
        )
        for verb, who in (("fork", "source"), ("preempt", "request"), ("retract", "request"))
    ),
    Mutation(
        12, "no fence while a step is open", "specstate/manager/lives.py",
        'self._refuse_open_step("fence", request)', "pass",
        preemption("fence_refuses"),
    ),
    Mutation(
        12, "a fork folds nothing that a verify has folded", "specstate/backends/tensors.py",
        "start, pending = start + pending, torch.zeros_like(pending)", "pass",
        preemption("a_fork_stands and deferred"),
    ),
    Mutation(
        12, "a parked cursor knows what a verify has folded", "specstate/backends/tensors.py",
        "            cursor.copy_(self.standing(record_row))\n", "            pass\n",
        preemption("preempted_request_resumes and deferred"),
    ),
    Mutation(
        12, "a preemption parks before it leaves the step", "specstate/manager/core.py",
        "        self._backend.park(record_slot, folded_by_verify)\n        self._leave_step(request)\n",
        "        self._leave_step(request)\n        self._backend.park(record_slot, folded_by_verify)\n",
        preemption("fails_is_called_again"),
    ),
    Mutation(
        12, "a flush folds nothing that a verify has folded", "specstate/manager/core.py",
        " and not request.folded_by_verify]", "]",
        manager("flush_at_every_allowed_moment"),
    ),
    Mutation(
        12, "a step learns of a flush before its first verify", "specstate/manager/core.py",
        "step.refresh()", "pass",
        manager("flush_at_every_allowed_moment"),
    ),
    Mutation(
        12, "a flush leaves verify nothing to fold", "specstate/kernels/reference.py",
        "step.rows[:, at.FOLD_LEN] = 0", "pass",
        manager("flush_at_every_allowed_moment"),
    ),
    Mutation(
        12, "a cancel folds the layers that did not verify", "specstate/kernels/reference.py",
        "self._fold(cursors.verify_fold_plan(step.rows), unverified)", "pass",
        manager("cancel_then_the_same_window"),
    ),
    Mutation(
        12, "a failed check of a verify takes its fold back", "specstate/backends/guard.py",
        "except BaseException:", "except ZeroDivisionError:",
        ("tests/test_exceptions.py", "-k", "any_operation_may_fail and debug and deferred"),
    ),
)  # fmt: skip


def copy_of_the_package(folder: Path) -> Path:
    """What the tests need, in ``folder``."""
    skip = shutil.ignore_patterns("__pycache__", ".*", "weights")
    for name in ("specstate", "tests", "examples", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # All cases, whoever runs this: CI leaves some out.
    environment = {"SPECSTATE_EXAMPLES": "150", **os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("CI", None)
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit code, and the end of what it said."""
    derandomized = "--hypothesis-profile=ci"
    ended = run(folder, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", derandomized, *tests)
    return ended.returncode, " | ".join(ended.stdout.strip().splitlines()[-3:])


def outcome(folder: Path, mutation: Mutation, unmutated: dict[tuple[str, ...], tuple[int, str]]) -> str:
    """ "killed", or why not. The copy is as before afterwards. ``unmutated``: what tests said that have run already."""
    path = folder / mutation.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutation.text) != 1:
        return f"NOT APPLIED: {mutation.text!r} stands {source.count(mutation.text)} times in {mutation.file}"
    if mutation.tests not in unmutated:
        unmutated[mutation.tests] = run_tests(folder, mutation.tests)
    code, said = unmutated[mutation.tests]
    if code != 0 or " passed" not in said:  # all may have been skipped
        return f"NO TEST: unmutated, pytest ends with {code}: {said}"
    path.write_text(source.replace(mutation.text, mutation.replacement), encoding="utf-8")
    try:
        code, said = run_tests(folder, mutation.tests)
    except subprocess.TimeoutExpired:
        return f"HANGS for {TIMEOUT_S} s"
    finally:
        path.write_text(source, encoding="utf-8")
    # 1: tests failed. Anything else says that the mutant does not even load.
    return {0: "SURVIVES", 1: "killed"}.get(code, f"BROKEN: pytest ends with {code}: {said}")


def check(mutations: tuple[Mutation, ...]) -> dict[Mutation, str]:
    """The outcome of each, printed as it comes."""
    outcomes: dict[Mutation, str] = {}
    unmutated: dict[tuple[str, ...], tuple[int, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = copy_of_the_package(Path(name).resolve())
        where = run(folder, "-c", "import specstate; print(specstate.__file__)").stdout.strip()
        assert Path(where).is_relative_to(folder), f"the tests would import {where}"
        for mutation in mutations:
            start = time.monotonic()
            outcomes[mutation] = outcome(folder, mutation, unmutated)
            print(f"{outcomes[mutation]:8} {mutation}, {time.monotonic() - start:.0f} s", flush=True)
    return outcomes


def main(words: list[str]) -> int:
    chosen = tuple(m for m in MUTATIONS if not words or any(word in str(m) for word in words))
    if not chosen:
        print(f"no mutation has any of {words}", file=sys.stderr)
        return 2
    outcomes = check(chosen)
    survivors = [mutation for mutation, what in outcomes.items() if what != "killed"]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
