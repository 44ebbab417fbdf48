"""Random draws for every row of a large matrix, made when a block of rows is looked at."""

from __future__ import annotations

from torch import Tensor

from dualenc.objectives.random import SharedRandom

ROWS_PER_DRAW = 256


class RowDraws:
    """(A, C) uniform draws in (0, 1), given out row by row: never the whole matrix at once.

    Every run of 256 rows of the global batch has its own numbered draw. So a row's numbers depend neither on the rank
    that holds it nor on the rows it is looked at with, and looking again gives the same ones.

    Args:
        random: moves on by the number of draws taken.
        num_rows: anchors of the global batch.
        width: C.
    """

    def __init__(self, random: SharedRandom, num_rows: int, width: int) -> None:
        self.seed, self.first = random.seed, random.draws
        self.num_rows, self.width = num_rows, width
        random.draws += max(1, -(-num_rows // ROWS_PER_DRAW))

    def of(self, rows: Tensor, like: Tensor) -> Tensor:
        """(n, C) the numbers of some rows (n,), with the device and precision of `like`."""
        if self.num_rows <= ROWS_PER_DRAW:
            return self._draw(0, like)[rows]
        numbers = like.new_empty(len(rows), self.width)
        draw_of_row = rows // ROWS_PER_DRAW
        for draw in draw_of_row.unique().tolist():
            place = (draw_of_row == draw).nonzero()[:, 0]
            numbers[place] = self._draw(draw, like)[rows[place] - draw * ROWS_PER_DRAW]
        return numbers

    def _draw(self, number: int, like: Tensor) -> Tensor:
        random = SharedRandom(self.seed)
        random.draws = self.first + number
        height = min(ROWS_PER_DRAW, self.num_rows - number * ROWS_PER_DRAW)
        return random.uniform(height, self.width, like=like)
