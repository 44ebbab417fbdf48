"""What is said of the measurements of a migration, whatever migrates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualenc.evaluation import migration_measures as measures
from dualenc.evaluation.report_page import Table


class MeasuredSample:
    """Base class of reports of a migration with the measurements of a sample.

        report = migrate("index", "new-model", data="my_beir", report_only=True)
        print(report.verdict())

    Attributes:
        systems: rows of `dualenc.evaluation.migration_measures.summarize`; none if nothing was
            measured.
    """

    systems: Sequence[Mapping[str, Any]]

    def is_worse(self) -> bool:
        """Return True if the new model finds significantly less than the old one."""
        return bool(self.systems) and measures.is_below(self.systems, measures.NEW)

    def verdict(self) -> str:
        """Return how the new model compares with the old one on the sample."""
        return measures.verdict(self.systems)

    def table(self) -> Table:
        """Return the measurements as a table with a caption."""
        return measures.sample_table(self.systems)

    def short_table(self) -> Table:
        """Return the main measurements as a table of 80 columns."""
        return measures.short_table(self.systems)
