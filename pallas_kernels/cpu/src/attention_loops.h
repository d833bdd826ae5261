// The loops of attention on vectors of kLanes float32, which the file that includes this defines, with kTile queries
// and kAcross vectors of slots in registers. Everything is local to that file.
//
// What a query gives does not depend, to the bit, on the other queries, nor on threads, nor on which of what it sees is
// in the prefix and which in the block: scores and weights are summed in the order of the text.
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "attention.h"

namespace specjax {
namespace {

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
constexpr int64_t kStrip = kAcross * kLanes;  // slots whose scores are summed at a time
static_assert(kFeatures % kLanes == 0, "features are whole vectors");
static_assert(kPage % kStrip == 0, "pages are whole strips");

inline Floats load(const float* at) {
  Floats a;
  std::memcpy(&a, at, sizeof a);
  return a;
}
inline void store(float* to, Floats a) { std::memcpy(to, &a, sizeof a); }
inline Floats splat(float x) { return Floats{} + x; }

// e^x of x <= 0 within 2 ulp: a power of two times a polynomial (Cephes' expf). 0 below the normal numbers.
inline Floats exp_of(Floats x) {
  Ints power = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
  Floats whole = __builtin_convertvector(power, Floats);
  Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints kept = ~(x <= -87.0f);  // a NaN stays one
  return reinterpret_cast<Floats>(reinterpret_cast<Ints>(p * reinterpret_cast<Floats>((power + 127) << 23)) & kept);
}

inline float largest(Floats a) {
  float top = a[0];
  for (int i = 1; i < kLanes; i++) top = a[i] > top ? a[i] : top;
  return top;
}
inline float sum_of(Floats a) {
  float sum = 0;
  for (int i = 0; i < kLanes; i++) sum += a[i];
  return sum;
}

// Of a key/value head of a row.
struct Head {
  const int32_t* pages;  // of the row; null for the one that is `row`
  int64_t row, number;   // the head's number among those of a row
  const float *block_keys, *block_values;
  const uint8_t* tree_mask;
  const int32_t* first;
  int64_t length, begin;  // slots that a query may see: [begin, length)
  const float* tail;      // keys of the last strip, [dim, kStrip], where slots are no multiple
  const float* turned;    // keys of the block, [dim, strips of columns]
};

// Where a head's keys and values of a row's page begin in the cache. A number that no page has is that of the nearest.
inline int64_t page_of(const Attention& call, const Head& head, int64_t number) {
  int64_t page = head.row;
  if (head.pages != nullptr) {
    page = head.pages[number];
    page = page < 0 ? 0 : page < call.held ? page : call.held - 1;
  }
  return (page * call.kv_heads + head.number) * call.page * call.dim;
}

// Calls run(where the page begins in the cache, its first slot in the row, [first, last) of the slots in the page) for
// the pages of the slots [begin, end) of a row.
template <class Run>
inline void by_page(const Attention& call, const Head& head, int64_t begin, int64_t end, Run run) {
  while (begin < end) {
    int64_t number = begin / call.page, start = number * call.page, stop = start + call.page;
    stop = stop < end ? stop : end;
    run(page_of(call, head, number), start, begin - start, stop - start);
    begin = stop;
  }
}

// scores[q, s] of kQueries queries and the slots of a strip; keys are `stride` apart.
template <int kQueries>
inline void strip_scores(const float* const* query, int64_t dim, const float* keys, int64_t stride, float* scores,
                         int64_t width) {
  Floats sums[kQueries][kAcross];
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 4
    for (int a = 0; a < kAcross; a++) sums[q][a] = Floats{};
  for (int64_t d = 0; d < dim; d++, keys += stride) {
    Floats key[kAcross];
#pragma GCC unroll 4
    for (int a = 0; a < kAcross; a++) key[a] = load(keys + a * kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 4
      for (int a = 0; a < kAcross; a++) sums[q][a] += splat(query[q][d]) * key[a];
  }
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 4
    for (int a = 0; a < kAcross; a++) store(scores + q * width + a * kLanes, sums[q][a]);
}

// out[q] += weights[q, s] * values[s] over `count` slots, for kVectors vectors of features from d on.
template <int kQueries, int kVectors>
inline void add_some(const float* weights, int64_t width, const float* values, int64_t dim, int64_t count,
                     float* const* out, int64_t d) {
  Floats sums[kQueries][kVectors];
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) sums[q][v] = load(out[q] + d + v * kLanes);
  for (int64_t s = 0; s < count; s++) {
    const float* value = values + s * dim + d;
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++)
        sums[q][v] += splat(weights[q * width + s]) * load(value + v * kLanes);
  }
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) store(out[q] + d + v * kLanes, sums[q][v]);
}

template <int kQueries>
inline void add_values(const float* weights, int64_t width, const float* values, int64_t dim, int64_t count,
                       float* const* out) {
  int64_t d = 0;
  for (; d + kAcross * kLanes <= dim; d += kAcross * kLanes)
    add_some<kQueries, kAcross>(weights, width, values, dim, count, out, d);
  for (; d < dim; d += kLanes) add_some<kQueries, 1>(weights, width, values, dim, count, out, d);
}

// Where a query's features begin in the arrays, `stride` apart.
struct Place {
  const float* query;
  float* out;
};

// The sink of a query of a key/value head, as large as scores are before they are scaled; the least number without.
inline float sink_of(const Attention& call, const Head& head, int64_t query) {
  if (call.sinks == nullptr) return -INFINITY;
  int64_t of_group = call.heads / call.kv_heads;
  return call.sinks[head.row * call.heads + head.number * of_group + query / call.nodes] / call.scale;
}

// The queries at `places`, the first of which is the `at`th of the head. `scratch` holds twice kTile rows of features,
// kTile rows of scores of the block, `block` each, and as many of what is seen, `width` each.
template <int kQueries>
void some_queries(const Attention& call, const Head& head, const Place* places, int64_t at, float* scratch,
                  int64_t width, int64_t block) {
  const float* queries[kQueries];
  float* outs[kQueries];
  int64_t stride = call.rows * call.nodes, prefix = head.length - head.begin, from[kQueries];
  float *features = scratch, *of_block = scratch + 2 * kTile * call.dim, *scores = of_block + kTile * block;
  for (int q = 0; q < kQueries; q++, features += 2 * call.dim) {
    for (int64_t d = 0; d < call.dim; d++) features[d] = places[q].query[d * stride];
    queries[q] = features, outs[q] = features + call.dim;
  }
  by_page(call, head, head.begin, head.length, [&](int64_t page, int64_t start, int64_t first, int64_t last) {
    const float* keys = call.keys + page;
    float* past = scores + (start + first - head.begin);
    for (int64_t s = first; s < last; s += kStrip, past += kStrip) {
      if (s + kStrip <= call.page) {
        strip_scores<kQueries>(queries, call.dim, keys + s, call.page, past, width);
      } else {
        strip_scores<kQueries>(queries, call.dim, head.tail, kStrip, past, width);
      }
    }
  });
  for (int64_t m = 0; m < block; m += kStrip)
    strip_scores<kQueries>(queries, call.dim, head.turned + m, block, of_block + m, block);
  for (int q = 0; q < kQueries; q++) {
    float* own = scores + q * width;
    int64_t node = (at + q) % call.nodes, count = 0;
    const uint8_t* sees = head.tree_mask + node * call.columns;
    for (int64_t m = 0; m < call.columns; m++) count += sees[m] != 0;
    int64_t unseen = head.first == nullptr ? 0 : head.first[node] - head.begin, most = prefix + call.columns - count;
    from[q] = unseen < prefix ? prefix : unseen < most ? unseen : most;  // where a window ends in the block
    for (int64_t s = 0; s < unseen && s < from[q]; s++) own[s] = -INFINITY;
    int64_t end = from[q];
    for (int64_t m = 0; m < call.columns; m++)
      if (sees[m]) own[end++] = of_block[q * block + m];
    for (; end < width; end++) own[end] = -INFINITY;
    Floats tops = splat(-INFINITY);
    for (int64_t s = 0; s < width; s += kLanes) {
      Floats a = load(own + s);
      Ints more = a > tops;
      tops = reinterpret_cast<Floats>((reinterpret_cast<Ints>(a) & more) | (reinterpret_cast<Ints>(tops) & ~more));
    }
    float most_seen = largest(tops), sink = sink_of(call, head, at + q);
    Floats top = splat(most_seen > sink ? most_seen : sink), total{};
    for (int64_t s = 0; s < width; s += kLanes) {
      Floats weight = exp_of((load(own + s) - top) * call.scale);
      total += weight;
      store(own + s, weight);
    }
    float sum = sum_of(total);
    if (call.sinks != nullptr) sum += exp_of((splat(sink) - top) * call.scale)[0];
    Floats share = splat(1.0f / sum);
    for (int64_t s = 0; s < width; s += kLanes) store(own + s, load(own + s) * share);
    std::memset(outs[q], 0, call.dim * 4);
  }
  by_page(call, head, head.begin, head.length, [&](int64_t page, int64_t start, int64_t first, int64_t last) {
    const float *weight = scores + (start + first - head.begin), *values = call.values + page + first * call.dim;
    add_values<kQueries>(weight, width, values, call.dim, last - first, outs);
  });
  for (int q = 0; q < kQueries; q++) {
    const uint8_t* sees = head.tree_mask + (at + q) % call.nodes * call.columns;
    const float* weight = scores + q * width + from[q];
    for (int64_t m = 0; m < call.columns; m++)
      if (sees[m]) add_values<1>(weight++, width, head.block_values + m * call.dim, call.dim, 1, outs + q);
  }
  for (int q = 0; q < kQueries; q++)
    for (int64_t d = 0; d < call.dim; d++) places[q].out[d * stride] = outs[q][d];
}

// A key/value head of a row, by its number among those of all rows; `tail` and `turned` are left out.
Head head_of(const Attention& call, int64_t number) {
  int64_t row = number / call.kv_heads, block = number * call.columns * call.dim;
  Head head{call.pages == nullptr ? nullptr : call.pages + row * call.row_pages,
            row,
            number % call.kv_heads,
            call.block_keys + block,
            call.block_values + block,
            call.tree_mask == nullptr ? nullptr : call.tree_mask + row * call.nodes * call.columns,
            call.first == nullptr ? nullptr : call.first + row * call.nodes,
            0,
            0,
            nullptr,
            nullptr};
  if (call.keys != nullptr) head.length = call.length[row] < call.slots() ? call.length[row] : call.slots();
  if (head.first != nullptr) {
    int64_t least = head.length;
    for (int64_t t = 0; t < call.nodes; t++) least = head.first[t] < least ? head.first[t] : least;
    head.begin = least > 0 ? least / kStrip * kStrip : 0;
  }
  return head;
}

bool few_units(const Attention& call, int64_t begin, int64_t end) {
  int64_t strips = (call.slots() + kStrip - 1) / kStrip;
  int64_t widest = (strips * kStrip + call.columns + kLanes - 1) / kLanes * kLanes;
  int64_t tail = call.page % kStrip == 0 ? 0 : call.dim * kStrip;
  int64_t block = (call.columns + kStrip - 1) / kStrip * kStrip;
  int64_t tiles = kTile * (2 * call.dim + block + widest);
  auto scratch = static_cast<float*>(std::malloc((tiles + tail + call.dim * block) * sizeof(float)));
  if (scratch == nullptr) return false;
  for (int64_t unit = begin; unit < end; unit++) {
    int64_t part = unit % call.parts(), head_of_row = unit / call.parts(), row = head_of_row / call.kv_heads;
    Head head = head_of(call, head_of_row);
    int64_t last = call.page / kStrip * kStrip;  // the strip that is not whole, of the only page
    if (tail > 0 && head.length > last) {
      const float* held = call.keys + page_of(call, head, 0) + last;
      float* keys = scratch + tiles;
      for (int64_t d = 0; d < call.dim; d++) {
        std::memcpy(keys + d * kStrip, held + d * call.page, (call.page - last) * 4);
        std::memset(keys + d * kStrip + call.page - last, 0, (kStrip - call.page + last) * 4);
      }
      head.tail = keys;
    }
    float* turned = scratch + tiles + tail;
    for (int64_t d = 0; d < call.dim; d++)
      for (int64_t m = 0; m < block; m++)
        turned[d * block + m] = m < call.columns ? head.block_keys[m * call.dim + d] : 0;
    head.turned = turned;
    int64_t seen = head.length > head.begin ? (head.length - head.begin + kStrip - 1) / kStrip * kStrip : 0;
    int64_t width = (seen + call.columns + kLanes - 1) / kLanes * kLanes;
    int64_t at = part * Attention::kPart, stop = at + Attention::kPart;
    stop = stop < call.queries() ? stop : call.queries();
    while (at < stop) {
      int64_t left = (stop - at + kTile - 1) / kTile, count = (stop - at + left - 1) / left;
      Place places[kTile];
      for (int64_t q = 0; q < count; q++) {
        int64_t in_row = head_of_row % call.kv_heads * call.queries() + at + q;
        int64_t begins = (in_row / call.nodes * call.dim * call.rows + row) * call.nodes + in_row % call.nodes;
        places[q] = {call.query + begins, call.out + begins};
      }
      switch (count) {
        case 1: some_queries<1>(call, head, places, at, scratch, width, block); break;
        case 2: some_queries<2>(call, head, places, at, scratch, width, block); break;
        case 3: some_queries<3>(call, head, places, at, scratch, width, block); break;
        case 4: some_queries<4>(call, head, places, at, scratch, width, block); break;
        default: some_queries<kTile>(call, head, places, at, scratch, width, block);
      }
      at += count;
    }
  }
  std::free(scratch);
  return true;
}

}  // namespace
}  // namespace specjax
