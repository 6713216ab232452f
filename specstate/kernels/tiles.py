"""How the kernels of one manager divide their work: what a table of tiles says for its config."""

from typing import NamedTuple

from specstate.config import StateConfig
from specstate.kernels.tile_table import FoldRule, PortableRule, TileTable, VerifyRule, default_table


class VerifyTile(NamedTuple):
    """One way to run the Hopper verify."""

    block_v: int
    """Rows of V a program."""
    at_once: bool
    """All of the state that has room is asked for before the window's inputs."""
    programs: int
    """How many share a multiprocessor, its registers and shared memory; fewer where the records leave no room."""


class PortableTile(NamedTuple):
    """One way to run the portable verify and fold."""

    block_v: int
    """Rows of V a program, at most."""
    num_warps: int


class Tiles:
    """What ``table`` says for ``config``, looked up once for each number of rows: a verify asks in every layer."""

    def __init__(self, config: StateConfig, table: TileTable) -> None:
        self._verify_rules = verify_rules(config, table)
        self._fold_rules = fold_rules(config, table)
        self._num_heads = config.layer.num_heads
        self._verify: dict[int, VerifyTile] = {}
        self._fold: dict[int, int] = {}
        self.portable = portable_tile(config, table)

    @property
    def all_verify(self) -> tuple[VerifyTile, ...]:
        """All that ``verify`` may choose, each once."""
        return tuple(dict.fromkeys(map(_tile, self._verify_rules)))

    @property
    def all_folds(self) -> tuple[int, ...]:
        """All that ``fold`` may choose, each once."""
        return tuple(dict.fromkeys(rule.block_v for rule in self._fold_rules))

    def verify(self, num_rows: int) -> VerifyTile:
        """For a step of ``num_rows`` rows."""
        tile = self._verify.get(num_rows)
        if tile is None:
            row_heads = num_rows * self._num_heads
            tile = _tile(next(rule for rule in self._verify_rules if rule.allows(row_heads)))
            self._verify[num_rows] = tile
        return tile

    def fold(self, num_rows: int) -> int:
        """Rows of V a program of the fold, for a plan of ``num_rows`` rows."""
        block_v = self._fold.get(num_rows)
        if block_v is None:
            block_v = next(rule for rule in self._fold_rules if rule.allows(num_rows)).block_v
            self._fold[num_rows] = block_v
        return block_v


def verify_rules(config: StateConfig, table: TileTable) -> list[VerifyRule]:
    """Those for ``config``, up to the first that allows any number of rows. None where head_v_dim is of no tile."""
    rules: list[VerifyRule] = []
    for rule in (*table.verify, *default_table().verify):
        if rule.covers(config):
            rules.append(rule)
            if rule.most_row_heads is None:
                break
    return rules


def fold_rules(config: StateConfig, table: TileTable) -> list[FoldRule]:
    """Those for ``config``, up to the first that allows any number of rows. None where head_v_dim is of no block."""
    rules: list[FoldRule] = []
    for rule in (*table.fold, *default_table().fold):
        if rule.covers(config):
            rules.append(rule)
            if rule.most_rows is None:
                break
    return rules


def portable_tile(config: StateConfig, table: TileTable) -> PortableTile:
    """For ``config`` at any number of rows."""
    rules: tuple[PortableRule, ...] = (*table.portable, *default_table().portable)
    rule = next(rule for rule in rules if rule.covers(config))
    return PortableTile(rule.block_v, rule.num_warps)


def _tile(rule: VerifyRule) -> VerifyTile:
    return VerifyTile(rule.block_v, rule.at_once, rule.programs)
