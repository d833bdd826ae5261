"""Several settings of drafting over one state, of which every step of a server names one.

Whatever a row was drafted by, it can be drafted by something else in the next step. Settings that
need nothing but the row's text and one draft's cache share these. Those that do not run the draft
let its cache fall behind; `catch_up` reads what it lacks, and says what the draft would have had
accepted of it. A draft that reads hidden states of the target keeps up, as these do not outlive a
step: that costs a pass of it in each. Other settings have a state of their own, which follows the
tokens of every step: one with a draft model of its own costs a pass of that in each, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from specjax.base.axes import Key
from specjax.base.grammars import Grammars
from specjax.base.pytree import pytree, replace, static, unchecked
from specjax.base.sampling import Sampling, is_greedy, most_likely, sampled_probs
from specjax.draft import reading
from specjax.draft.best_first import BestFirstDrafter, BestFirstState
from specjax.draft.drafter import Drafter, DraftState, Seen, Step, Wants
from specjax.draft.hybrid import HybridDrafter, HybridState
from specjax.draft.plain import PlainDrafter
from specjax.draft.prompt_lookup import Text, TextDrafter, append, read
from specjax.draft.reading import ModelState
from specjax.draft.retrieval import Corpus, RetrievalDrafter
from specjax.draft.static import ExpansionDrafter
from specjax.draft.suffix import SuffixDrafter
from specjax.models.kv_cache import cache_dtype, empty_cache
from specjax.models.layers import write_window
from specjax.models.transformer import Model, trunk, unembed
from specjax.parallel.mesh import DATA
from specjax.trees.construction import Construction
from specjax.trees.tree import TokenTree

UNKNOWN = -1.0
"""In place of a probability: the token was not drawn from the target, or its draft is not known."""


@pytree
class SharedState:
    """What settings share of a row, and the states of those that share nothing.

    `text` holds its tokens, the root included, and `probs` how likely the target had found each
    when it gave it (`UNKNOWN` for those of the prompt). `held` is the draft's state, of as many
    tokens as its cache is long; the logits of a cache of no token are nothing. `own` holds an
    empty state for each setting that shares, and its drafter's state for each other one.
    """

    text: Text
    probs: Float[Array, "B S"]
    held: ModelState | None
    own: tuple[DraftState, ...]


class _Within(NamedTuple):
    """The shared state, and that of a setting's own drafter within a step."""

    shared: SharedState
    own: Any


@pytree
class SwitchingDrafter(Drafter):
    """The settings by their names, over one state.

    Those that `share` draft with `model`, from the text, or nothing: an `ExpansionDrafter` of one
    draft, a `BestFirstDrafter` or `HybridDrafter` of it without a second draft, a `TextDrafter`, a
    `RetrievalDrafter`, a `SuffixDrafter`, a `PlainDrafter`. Those that hold the draft hold it
    without weights, which they are given where they draft. Any other drafter keeps its state.
    `of_setting` is the same with another setting in `use`; its trees are that setting's.
    """

    model: Model | None
    drafters: tuple[Drafter, ...]
    names: tuple[str, ...] = static()
    share: tuple[bool, ...] = static()
    use: str | None = static(default=None)

    @classmethod
    def of(cls, drafters: dict[str, Drafter]) -> "SwitchingDrafter":
        """The switch between drafters, by the names of their settings.

        The first that drafts with a model that can be shared names it.

        Raises:
          ValueError: one of them has several settings itself.
        """
        model, held, share = None, [], []
        for name, drafter in drafters.items():
            if len(drafter.settings) > 1:
                raise ValueError(f"the setting {name} is a switch between settings itself.")
            own = _model_of(drafter)
            model = own if model is None else model
            shares = type(drafter) in (TextDrafter, RetrievalDrafter, SuffixDrafter, PlainDrafter)
            shares |= own is not None and model is not None and _same(own, model)
            held.append(_with_model(drafter, None) if shares else drafter)
            share.append(shares)
        return cls(model, tuple(held), tuple(drafters), tuple(share))

    @property
    def settings(self) -> tuple[str, ...]:
        """Their names."""
        return self.names

    def of_setting(self, name: str) -> "SwitchingDrafter":
        """The same with a setting in use."""
        return replace(self, use=name)

    def under(self, grammars: Grammars) -> "SwitchingDrafter":
        """The same settings, within rows' grammars."""
        return replace(self, drafters=tuple(each.under(grammars) for each in self.drafters))

    @property
    def runs_draft(self) -> bool:
        """Whether the setting in use needs the shared draft to have read all of a row's text."""
        at = self._at
        return self.share[at] and isinstance(self.drafters[at], _Runs)

    @property
    def remembers(self) -> int:
        """Tokens of earlier texts that settings draft from, which is as many for each of them."""
        return max(drafter.remembers for drafter in self.drafters)

    def with_earlier(self, corpus: Corpus) -> "SwitchingDrafter":
        """The same settings with other earlier texts."""
        return replace(self, drafters=tuple(each.with_earlier(corpus) for each in self.drafters))

    @property
    def keeps_up(self) -> bool:
        """Whether the shared draft reads the tokens of every step in it, whatever drafted them."""
        return bool(reading.read_by([self.model]))

    @property
    def wants(self) -> Wants:
        """What the shared draft and the settings with states of their own want: they learn from
        every step.
        """
        layers = {*reading.read_by([self.model])}
        layers = layers.union(*(drafter.wants.hidden_layers for drafter in self.drafters))
        return Wants(max(each.wants.top_tokens for each in self.drafters), tuple(sorted(layers)))

    @property
    def state_specs(self) -> SharedState:
        """Rows first, but for states of drafters that are spread another way."""
        rows = P(DATA)
        own = tuple(
            () if share else drafter.state_specs
            for share, drafter in zip(self.share, self.drafters, strict=True)
        )
        return unchecked(SharedState, text=rows, probs=rows, held=rows, own=own)

    @property
    def needs_probs(self) -> bool:
        """It keeps how likely the target found each token."""
        return True

    @property
    def _used(self) -> tuple[Drafter, ...]:
        """The drafter in use, without weights; all of them if none is."""
        if self.use is None:
            return self.drafters
        return (self.drafters[self._at],)

    @property
    def _at(self) -> int:
        """The place of the setting in use."""
        return 0 if self.use is None else self.names.index(self.use)

    @property
    def _drafter(self) -> Drafter:
        """The drafter in use, with the weights of the shared draft."""
        at = self._at
        return _with_model(self.drafters[at], self.model) if self.share[at] else self.drafters[at]

    @property
    def window(self) -> int:
        """The most tokens a step can commit."""
        return max(drafter.window for drafter in self._used)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        used = self.names if self.use is None else (self.use,)
        return max(self.of_setting(name)._drafter.vocab_size for name in used)

    @property
    def num_slots(self) -> int:
        """Node slots of the largest tree."""
        return max(drafter.num_slots for drafter in self._used)

    @property
    def construction(self) -> Construction:
        """How the trees of the largest setting are made."""
        return max(self._used, key=lambda each: each.num_slots).construction

    @property
    def takes_nodes(self) -> bool:
        """Whether the settings in use may be given nodes."""
        return all(drafter.takes_nodes for drafter in self._used)

    def init(
        self,
        prompt: Int32[Array, "B T"],
        length: Int32[Array, " B"],
        slots: int,
        seen: Seen,
    ) -> SharedState:
        """The prompts, of which the shared draft has read nothing unless it keeps up."""
        rows = prompt.shape[0]
        held = None
        if self.keeps_up:
            assert self.model is not None
            layers, room = self.wants.hidden_layers, slots + self._more
            held = reading.prefill(self.model, prompt, length, room, seen.hidden_states, layers)
        elif self.model is not None:
            dtype = cache_dtype(self.model.embedding.dtype)
            cache = empty_cache(self.model.config, rows, slots + self._more, dtype,
                                self.model.kv_heads)  # fmt: skip
            held = ModelState(cache, jnp.zeros((rows, self.model.config.vocab_size)))
        text = read(prompt, length, slots)
        own = tuple(
            () if share else drafter.init(prompt, length, slots, self._seen_by(drafter, seen))
            for share, drafter in zip(self.share, self.drafters, strict=True)
        )
        return SharedState(text, jnp.full(text.tokens.shape, UNKNOWN), held, own)

    @property
    def _more(self) -> int:
        """Slots of the shared cache for tokens that a hybrid runs anew (see its `commit`)."""
        return max(
            drafter.window if share and isinstance(drafter, HybridDrafter) else 0
            for share, drafter in zip(self.share, self.drafters, strict=True)
        )

    def propose(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: SharedState,
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[TokenTree, _Within]:
        """The trees of the setting in use."""
        at, drafter = self._at, self._drafter
        own = _own_state(drafter, state) if self.share[at] else state.own[at]
        tree, own = drafter.propose(key, position, own, last, sampling)
        return tree, _Within(state, own)

    def commit(self, state: _Within, step: Step) -> SharedState:
        """The text with the tokens of a step, and the draft caught up if this setting runs it.

        States that are not shared follow.
        """
        at, drafter = self._at, self._drafter
        own = drafter.commit(state.own, self._shown(drafter, step))
        after = self._followed(state.shared, step, at)
        if self.share[at]:
            return replace(after, held=_draft_of(drafter, own, after.held))
        return replace(after, own=(*after.own[:at], own, *after.own[at + 1 :]))

    def follow(self, state: SharedState, step: Step) -> SharedState:
        """The text with tokens that came from elsewhere; the shared draft falls behind, or keeps
        up.
        """
        return self._followed(state, step)

    def _followed(self, state: SharedState, step: Step, but: int | None = None) -> SharedState:
        """The state with a step's tokens in its text and in states of their own, but one."""
        own = tuple(
            held if share or at == but else drafter.follow(held, self._shown(drafter, step))
            for at, (share, drafter, held) in enumerate(
                zip(self.share, self.drafters, state.own, strict=True)
            )
        )
        after = replace(_longer(state, step), own=own)
        if not self.keeps_up or (but is not None and self.runs_draft):
            return after
        assert self.model is not None
        assert state.held is not None
        layers = self.wants.hidden_layers
        held = reading.catch_up(
            self.model, state.held, step.tokens, step.count, step.hidden_states, layers
        )
        return replace(after, held=held)

    def _shown(self, drafter: Drafter, step: Step) -> Step:
        """A step as a drafter is to see it."""
        return replace(step, seen=self._seen_by(drafter, step.seen))

    def _seen_by(self, drafter: Drafter, seen: Seen) -> Seen:
        """What a drafter wants of what all want together."""
        own, layers = drafter.wants, self.wants.hidden_layers
        hidden = reading.of_layers(seen.hidden_states, layers, own.hidden_layers)
        return Seen(seen.top_tokens[..., : own.top_tokens], hidden)

    def truncate(self, state: SharedState, length: Int32[Array, " B"]) -> SharedState | None:
        """The state after fewer tokens; a draft that fell behind reads the last of them anew, for
        its logits.
        """
        held = state.held
        own = tuple(
            () if share else drafter.truncate(each, length)
            for share, drafter, each in zip(self.share, self.drafters, state.own, strict=True)
        )
        if any(each is None for each in own):
            return None
        if held is not None and self.keeps_up:
            assert self.model is not None
            held = reading.shorter(self.model, held, length)
        elif held is not None:
            kept = jnp.minimum(held.cache.length, length - 1)
            held = replace(held, cache=replace(held.cache, length=kept))
        text, probs = replace(state.text, length=length), jnp.full_like(state.probs, UNKNOWN)
        return SharedState(text, probs, held, own)

    def catch_up(
        self, state: SharedState, sampling: Sampling, size: int
    ) -> tuple[SharedState, Float[Array, "B _"]]:
        """The draft after at most `size` more tokens of each row's text.

        Also how likely each of these tokens was to be accepted had the draft drawn for its place:
        the mean of min(1, q/p) over the target's own draws is the acceptance rate of the draft
        (Leviathan et al., arXiv 2211.17192, theorem 3.5), and products of it along the text are
        how often a chain survives. `UNKNOWN` where it cannot be said.

        Near the end of its cache it begins before what is new: the same tokens give the same again.
        """
        model, held = self.model, state.held
        assert model is not None
        assert held is not None
        assert held.logits is not None
        text, size = state.text, min(size, held.cache.slots)
        before = held.cache.length
        begin = jnp.minimum(before, held.cache.slots - size)
        cache = replace(held.cache, length=begin)
        at = begin[:, None] + jnp.arange(size, dtype=jnp.int32)
        count = jnp.clip(text.length - begin, 0, size)
        inside = jnp.minimum(at, text.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(text.tokens, inside, axis=1)
        tree_mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (*at.shape, size))
        x, new, *_ = trunk(model, tokens, at, cache, tree_mask)
        logits = unembed(model, x).T.reshape(*at.shape, -1)
        after = jnp.concatenate([held.logits[:, None], logits], axis=1)
        last = jnp.take_along_axis(after, count[:, None, None], axis=1)[:, 0]
        p = jnp.take_along_axis(state.probs, inside, axis=1)
        known = (p >= 0) & (at < text.length[:, None]) & (at >= before[:, None]) & (at > 0)
        chance = jnp.where(known, _accepted(after[:, :-1], tokens, p, sampling), UNKNOWN)
        return replace(state, held=ModelState(cache.keep(new, None, count), last)), chance


def _accepted(
    logits: Float[Array, "B T V"],
    tokens: Int32[Array, "B T"],
    p: Float[Array, "B T"],
    sampling: Sampling,
) -> Float[Array, "B T"]:
    """min(1, q/p) of tokens; of greedy rows whether the draft has the same likeliest token."""
    greedy = is_greedy(sampling)
    q = sampled_probs(logits, sampling, greedy)
    own = jnp.take_along_axis(q, tokens[:, :, None], axis=2)[..., 0]
    same = (most_likely(logits) == tokens).astype(own.dtype)
    return jnp.where(greedy[:, None], same, jnp.minimum(1.0, own / jnp.maximum(p, 1e-30)))


def _longer(state: SharedState, step: Step) -> SharedState:
    """The state with a step's tokens in its text."""
    probs = jnp.full(step.tokens.shape, UNKNOWN) if step.probs is None else step.probs
    written = write_window(state.probs, probs, state.text.length, axis=1)
    return replace(state, text=append(state.text, step), probs=written)


def _same(one: Model, other: Model) -> bool:
    """Whether two models are of the same arrays."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=False)
    return one.config == other.config and all(a is b for a, b in pairs)


_Runs = ExpansionDrafter | BestFirstDrafter | HybridDrafter
"""Those that share run the shared draft."""


def _model_of(drafter: Drafter) -> Model | None:
    """The model that a drafter drafts with, if that is all that it has a state of but the text.

    A drafter of a class derived from these may have another state, or none at all.
    """
    if type(drafter) not in (ExpansionDrafter, BestFirstDrafter, HybridDrafter):
        return None
    match drafter:
        case ExpansionDrafter(groups=(model,), sizes=(1,)):
            return model
        case BestFirstDrafter(model=model, second=None):
            return model
        case HybridDrafter(draft=BestFirstDrafter(model=model, second=None)):
            return model
    return None


def _with_model(drafter: Drafter, model: Model | None) -> Drafter:
    """The same drafter with other weights of its model, perhaps none; others as they are."""
    match drafter:
        case ExpansionDrafter():
            return unchecked(ExpansionDrafter, **vars(drafter) | {"groups": (model,)})
        case BestFirstDrafter():
            return unchecked(BestFirstDrafter, **vars(drafter) | {"model": model})
        case HybridDrafter():
            own = _with_model(drafter.draft, model)
            return unchecked(HybridDrafter, **vars(drafter) | {"draft": own})
    return drafter


def _own_state(drafter: Drafter, state: SharedState) -> Any:
    """The state of a setting's drafter."""
    match drafter:
        case ExpansionDrafter():
            return (state.held,)
        case BestFirstDrafter():
            assert state.held is not None
            return drafter.begun(state.held)
        case HybridDrafter():
            assert state.held is not None
            draft = drafter.draft.begun(state.held)
            return HybridState(draft, state.text, draft.slots > 0)
        case TextDrafter() | RetrievalDrafter():
            return state.text
    return ()


def _draft_of(drafter: Drafter, own: Any, before: ModelState | None) -> ModelState | None:
    """The draft's state after a step; as it was if the setting does not run it."""
    match drafter:
        case ExpansionDrafter():
            return own[0]
        case BestFirstDrafter():
            assert isinstance(own, BestFirstState)
            return own.held
        case HybridDrafter():
            return own.draft.held
    return before
