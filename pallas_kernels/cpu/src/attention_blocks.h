// Attention of many queries: blocks of keys, one after the other, meet all queries of a unit while they lie in cache.
// A softmax goes along (Milakov & Gimelshein, 2018): what was summed shrinks where a larger score comes.
//
// Blocks begin at multiples of kKeys, so that what a query gives does not depend, to the bit, on the other queries.
#include "attention_loops.h"

namespace specjax {
namespace {

constexpr int64_t kKeys = 64;  // of a block
static_assert(kKeys % kStrip == 0, "keys of a block are whole strips");
static_assert(kPage % kKeys == 0, "pages are whole blocks");

// Queries of a unit, each with the sums so far: `total` of weights, `out` of values by weight, of scores less `top`.
struct Queries {
  const Attention& call;
  Head head;
  int64_t row, of_row;   // which row it is, and the number of its first query among those of the row
  int64_t at, count;     // the first of the head's queries, and how many
  float *query, *out;    // [count, dim]
  float *top, *total;    // [count]
  float *keys, *values;  // of a block: [dim, kKeys], [kKeys, dim]
  float* scores;         // [kTile, kKeys]
  uint8_t* used;         // [columns]: whether one of the queries sees it
  int32_t* ends;         // [nodes]: behind the last column that a node of a tree sees

  int64_t node(int64_t q) const { return (at + q) % call.nodes; }
  static size_t bytes(const Attention& call) {
    int64_t floats = 2 * Attention::kManyPart * (call.dim + 1) + 2 * call.dim * kKeys + kTile * kKeys;
    return (floats + call.nodes) * 4 + call.columns;
  }
};

// Of a block's keys those that a query may see: [begin, end), of which a tree's mask leaves out some.
struct Range {
  int64_t begin, end;
};

inline Range within_block(int64_t begin, int64_t end, int64_t start) {
  begin -= start, end -= start;
  begin = begin > 0 ? begin : 0, begin = begin < kKeys ? begin : kKeys, end = end < kKeys ? end : kKeys;
  return {begin, end > begin ? end : begin};
}

inline Range seen_slots(const Queries& at, int64_t q, int64_t start) {
  return within_block(at.head.first == nullptr ? 0 : at.head.first[at.node(q)], at.head.length, start);
}

inline Range seen_columns(const Queries& at, int64_t q, int64_t start) {
  if (at.call.tree_mask != nullptr) return within_block(0, at.ends[at.node(q)], start);
  int64_t last = at.node(q) + 1;
  return within_block(at.call.window > 0 ? last - at.call.window : 0, last, start);
}

// Scores of a query that it does not see become -inf.
inline void hide(float* scores, Range seen, const uint8_t* mask) {
  for (int64_t s = 0; s < seen.begin; s++) scores[s] = -INFINITY;
  for (int64_t s = seen.end; s < kKeys; s++) scores[s] = -INFINITY;
  for (int64_t s = seen.begin; mask != nullptr && s < seen.end; s++) scores[s] = mask[s] ? scores[s] : -INFINITY;
}

// Scores become weights; what was summed before shrinks to the same measure.
inline void weigh(const Queries& at, int64_t q, float* scores) {
  Floats tops = splat(-INFINITY), sum{};
  for (int64_t s = 0; s < kKeys; s += kLanes) {
    Floats a = load(scores + s);
    Ints more = a > tops;
    tops = reinterpret_cast<Floats>((reinterpret_cast<Ints>(a) & more) | (reinterpret_cast<Ints>(tops) & ~more));
  }
  float before = at.top[q], most = largest(tops), top = most > before ? most : before;
  Floats from = splat(top == -INFINITY ? 0.0f : top);  // so that nothing has been seen but what is no number
  for (int64_t s = 0; s < kKeys; s += kLanes) {
    Floats weight = exp_of((load(scores + s) - from) * at.call.scale);
    sum += weight;
    store(scores + s, weight);
  }
  if (top > before) {
    Floats kept = exp_of((splat(before) - from) * at.call.scale);
    at.top[q] = top, at.total[q] *= kept[0];
    float* out = at.out + q * at.call.dim;
    for (int64_t d = 0; d < at.call.dim; d += kLanes) store(out + d, load(out + d) * kept);
  }
  at.total[q] += sum_of(sum);
}

// A block of keys and values for kQueries queries from q on; `start` is its first slot or column.
template <int kQueries, class Seen>
void some_of_block(const Queries& at, int64_t q, const float* values, const uint8_t* mask, int64_t start, Seen seen) {
  Range ranges[kQueries], all{kKeys, 0};
  for (int i = 0; i < kQueries; i++) {
    ranges[i] = seen(at, q + i, start);
    if (ranges[i].begin == ranges[i].end) continue;
    all.begin = ranges[i].begin < all.begin ? ranges[i].begin : all.begin;
    all.end = ranges[i].end > all.end ? ranges[i].end : all.end;
  }
  if (all.begin >= all.end) return;
  const float* queries[kQueries];
  float* outs[kQueries];
  for (int i = 0; i < kQueries; i++)
    queries[i] = at.query + (q + i) * at.call.dim, outs[i] = at.out + (q + i) * at.call.dim;
  for (int64_t s = 0; s < kKeys; s += kStrip)
    strip_scores<kQueries>(queries, at.call.dim, at.keys + s, kKeys, at.scores + s, kKeys);
  for (int i = 0; i < kQueries; i++) {
    const uint8_t* own = mask == nullptr ? nullptr : mask + at.node(q + i) * at.call.columns + start;
    hide(at.scores + i * kKeys, ranges[i], own);
    weigh(at, q + i, at.scores + i * kKeys);
  }
  add_values<kQueries>(at.scores + all.begin, kKeys, values + all.begin * at.call.dim, at.call.dim,
                       all.end - all.begin, outs);
}

template <class Seen>
void whole_block(const Queries& at, const float* values, const uint8_t* mask, int64_t start, Seen seen) {
  for (int64_t q = 0; q < at.count; q += kTile) {
    switch (at.count - q) {
      case 1: some_of_block<1>(at, q, values, mask, start, seen); break;
      case 2: some_of_block<2>(at, q, values, mask, start, seen); break;
      case 3: some_of_block<3>(at, q, values, mask, start, seen); break;
      case 4: some_of_block<4>(at, q, values, mask, start, seen); break;
      default: some_of_block<kTile>(at, q, values, mask, start, seen);
    }
  }
}

// The prefix, whose keys are put together from where they lie a page's slots apart.
void past_blocks(const Queries& at) {
  const Attention& call = at.call;
  int64_t begin = at.head.begin / kKeys * kKeys;
  by_page(call, at.head, begin, at.head.length, [&](int64_t page, int64_t start, int64_t first, int64_t last) {
    const float *keys = call.keys + page, *values = call.values + page;
    for (int64_t s = first; s < last; s += kKeys) {
      int64_t count = last - s < kKeys ? last - s : kKeys;
      for (int64_t d = 0; d < call.dim; d++) {
        std::memcpy(at.keys + d * kKeys, keys + d * call.page + s, count * 4);
        std::memset(at.keys + d * kKeys + count, 0, (kKeys - count) * 4);
      }
      whole_block(at, values + s * call.dim, nullptr, start + s, seen_slots);
    }
  });
}

// The block of the pass: of a plain sequence from the first to the last column that a query sees.
void own_blocks(const Queries& at) {
  const Attention& call = at.call;
  bool one_head = at.at / call.nodes == (at.at + at.count - 1) / call.nodes;
  int64_t least = one_head ? at.node(0) : 0, most = one_head ? at.node(at.count - 1) : call.nodes - 1;
  int64_t begin = 0, end = call.columns;
  if (call.tree_mask == nullptr) {
    begin = call.window > 0 && least >= call.window ? least - call.window + 1 : 0;
    end = most + 1;
  } else {
    std::memset(at.used, 0, call.columns);
    end = 0;
    for (int64_t n = least; n <= most; n++) {
      const uint8_t* seen = at.head.tree_mask + n * call.columns;
      int64_t last = call.columns;
      while (last > 0 && !seen[last - 1]) last--;
      for (int64_t m = 0; m < last; m++) at.used[m] |= seen[m];
      at.ends[n] = static_cast<int32_t>(last), end = last > end ? last : end;
    }
  }
  for (int64_t start = begin / kKeys * kKeys; start < end; start += kKeys) {
    int64_t count = call.columns - start < kKeys ? call.columns - start : kKeys;
    const float *keys = at.head.block_keys + start * call.dim, *values = at.head.block_values + start * call.dim;
    for (int64_t d = 0; d < call.dim; d++) {
      for (int64_t m = 0; m < count; m++) at.keys[d * kKeys + m] = keys[m * call.dim + d];
      std::memset(at.keys + d * kKeys + count, 0, (kKeys - count) * 4);
    }
    if (call.tree_mask == nullptr) {
      whole_block(at, values, nullptr, start, seen_columns);
      continue;
    }
    for (int64_t m = 0; m < count; m++) {  // what nobody sees may hold anything
      float* to = at.values + m * call.dim;
      at.used[start + m] ? std::memcpy(to, values + m * call.dim, call.dim * 4) : std::memset(to, 0, call.dim * 4);
    }
    whole_block(at, at.values, at.head.tree_mask, start, seen_columns);
  }
}

// Calls run(q, the first of them, how many) for queries of one head, whose nodes lie one after the other.
template <class Run>
void by_head(const Queries& at, Run run) {
  const Attention& call = at.call;
  for (int64_t q = 0; q < at.count;) {
    int64_t left = call.nodes - at.node(q), count = at.count - q < left ? at.count - q : left;
    int64_t query = at.of_row + q;
    run(q, (query / call.nodes * call.dim * call.rows + at.row) * call.nodes + query % call.nodes, count);
    q += count;
  }
}

void many_queries(const Queries& at) {
  const Attention& call = at.call;
  int64_t stride = call.rows * call.nodes;
  by_head(at, [&](int64_t q, int64_t first, int64_t count) {
    for (int64_t d = 0; d < call.dim; d++)
      for (int64_t i = 0; i < count; i++) at.query[(q + i) * call.dim + d] = call.query[first + d * stride + i];
  });
  std::memset(at.out, 0, at.count * call.dim * 4);
  for (int64_t q = 0; q < at.count; q++)
    at.top[q] = sink_of(call, at.head, at.at + q), at.total[q] = call.sinks == nullptr ? 0.0f : 1.0f;
  past_blocks(at);
  own_blocks(at);
  for (int64_t q = 0; q < at.count; q++) at.total[q] = 1.0f / at.total[q];
  by_head(at, [&](int64_t q, int64_t first, int64_t count) {
    for (int64_t d = 0; d < call.dim; d++)
      for (int64_t i = 0; i < count; i++)
        call.out[first + d * stride + i] = at.out[(q + i) * call.dim + d] * at.total[q + i];
  });
}

bool many_units(const Attention& call, int64_t begin, int64_t end) {
  auto scratch = static_cast<float*>(std::malloc(Queries::bytes(call)));
  if (scratch == nullptr) return false;
  int64_t most = Attention::kManyPart, dim = call.dim;
  float *out = scratch + most * dim, *top = out + most * dim, *total = top + most, *keys = total + most;
  float *values = keys + dim * kKeys, *scores = values + dim * kKeys;
  auto ends = reinterpret_cast<int32_t*>(scores + kTile * kKeys);
  auto used = reinterpret_cast<uint8_t*>(ends + call.nodes);
  for (int64_t unit = begin; unit < end; unit++) {
    int64_t head = unit / call.parts(), at = unit % call.parts() * most;
    int64_t count = call.queries() - at < most ? call.queries() - at : most;
    many_queries({call, head_of(call, head), head / call.kv_heads, head % call.kv_heads * call.queries() + at, at, count,
                  scratch, out, top, total, keys, values, scores, used, ends});
  }
  std::free(scratch);
  return true;
}

bool attention_units(const Attention& call, int64_t begin, int64_t end) {
  return call.is_many() ? many_units(call, begin, end) : few_units(call, begin, end);
}

}  // namespace
}  // namespace specjax
