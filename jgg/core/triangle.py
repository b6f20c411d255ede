"""The tiles of a square matrix that lie on or below its diagonal: a symmetric matrix needs no others."""

import numpy as np


def lower_tiles(size: int, block_rows: int, block_columns: int, band: int) -> tuple[np.ndarray, np.ndarray]:
    """The row tile and the column tile of each tile that has an element on or below the diagonal.

    Tiles run down a band of `band` row tiles, column after column, so that the L2 cache serves the rows of a band and
    of a column more than once. A matrix of 9 rows in tiles [2, 4] with a band of 2 has

        row tile       0  1 |  2  3  2  3 |  4  4  4
        column tile    0  0 |  0  0  1  1 |  0  1  2

    where | separates the bands.

    Returns: int32 [tiles] each.
    """
    first_rows, first_columns = np.arange(0, size, block_rows), np.arange(0, size, block_columns)
    row_tile, column_tile = np.nonzero((first_rows + block_rows)[:, None] > first_columns[None, :])
    order = np.lexsort((row_tile, column_tile, row_tile // band))
    return row_tile[order].astype(np.int32), column_tile[order].astype(np.int32)
