"""Trees of what followed in the text itself and in texts that came before it (SuffixDecoding, arXiv
2411.04975).

Earlier texts lie in a suffix array of a fixed size, which is made anew as texts come, away from the
device: a program reads whichever it is given.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Int32

from specjax.base.axes import Key
from specjax.base.pytree import pytree, replace
from specjax.base.sampling import Sampling
from specjax.draft.prompt_lookup import Text, TextSource, grow_beside
from specjax.draft.retrieval import Corpus, RetrievalDrafter, arrays_of
from specjax.trees.tree import TokenTree


@pytree
class SuffixDrafter(RetrievalDrafter):
    """The tree of a `RetrievalDrafter` over earlier texts, in which branches of the text itself
    compete for the same slots, below any node.
    """

    def propose(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: Text,
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[TokenTree, Text]:
        """The tree of the likeliest nodes of both; nothing of it is random."""
        del key, position, sampling
        source = TextSource(state, self.trust, None, self.least, self.followers)
        nodes = grow_beside(source, self.growth, self.grown(state))
        return self.tree(nodes, last), state

    @property
    def remembers(self) -> int:
        """Tokens of earlier texts."""
        return self.corpus.order.shape[0]

    def with_earlier(self, corpus: Corpus) -> "SuffixDrafter":
        """The same after other texts; their corpus has `remembers` tokens."""
        return replace(self, corpus=corpus)


def earlier(texts: Sequence[Sequence[int] | np.ndarray], size: int) -> Corpus:
    """The corpus of the last of some texts, of exactly `size` tokens, their ends included.

    What of it no text takes matches nothing. Arrays are the host's.
    """
    kept, room = list[Sequence[int] | np.ndarray](), size
    for text in reversed(texts):
        if room < 2:
            break
        kept.append(text[: room - 1])
        room -= len(kept[-1]) + 1
    return arrays_of(kept[::-1], size)
