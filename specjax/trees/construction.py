"""How trees are made, as far as verification must know."""

import dataclasses

DRAWN = "drawn"
"""Children of sampled rows are independent draws from the draft's distribution."""
DISTINCT = "distinct"
"""Children of sampled rows are draws without replacement, in the order in which they were drawn."""
TOP_K = "top-k"
"""Children are chosen, whatever the row's temperature: the draft's most likely tokens."""


@dataclasses.dataclass(frozen=True)
class Construction:
    """How trees are made, as far as rules must know.

    `children` is `DRAWN`, `DISTINCT` or `TOP_K`; `chain` says that no draft gives a node two.
    """

    children: str
    drafts: int = 1
    chain: bool = False

    def __str__(self) -> str:
        what = "chains" if self.chain else "trees"
        of = f", of {self.drafts} drafts merged" if self.drafts > 1 else ""
        return f"{what} of {self.children} children{of}"
