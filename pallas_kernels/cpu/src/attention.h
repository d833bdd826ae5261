// Attention of a tree's nodes to a cached prefix and to the block of keys that they may see, in float32.
#ifndef SPECJAX_CPU_ATTENTION_H_
#define SPECJAX_CPU_ATTENTION_H_

#include <cstddef>
#include <cstdint>

namespace specjax {

// Arrays lie row after row. Query head h uses key/value head h / (heads / kv_heads); the keys of the prefix are
// stored transposed. A row's prefix is some pages of a cache, one after the other. A node sees the slots of its row's
// prefix from `first` to `length`, and block columns where `tree_mask` is not 0; what it does not see may hold
// anything, but of many nodes what another one sees are numbers.
struct Attention {
  int64_t rows, heads, kv_heads, nodes, columns, dim;  // dim a multiple of kFeatures
  int64_t window;             // of a plain sequence, how many tokens up to its own a token sees; 0 for all
  const float* query;         // [heads, dim, rows, nodes]: features first, as activations are
  const float* block_keys;    // [rows, kv_heads, columns, dim]
  const float* block_values;  // the same
  // [rows, nodes, columns]; null for a plain sequence, whose tokens see those up to them. Up to kFewNodes nodes it
  // is applied in `some_queries` (attention_loops.h), of more in `hide` (attention_blocks.h).
  const uint8_t* tree_mask;
  const float* keys;          // [held, kv_heads, dim, page]; null without a prefix
  const float* values;        // [held, kv_heads, page, dim]
  int64_t held;               // pages of the cache
  int64_t page;               // slots of a page; where a row has several, a multiple of kPage
  int64_t row_pages;          // pages of a row
  const int32_t* pages;       // [rows, row_pages]: which they are; null for one each, in order
  const int32_t* length;      // [rows]
  const int32_t* first;       // [rows, nodes], or null for 0
  const float* sinks;         // [rows, heads]: scores that take a share and give nothing; null for none
  float scale;                // of scores
  float* out;                 // [heads, dim, rows, nodes]

  int64_t slots() const { return row_pages * page; }  // of a row
  int64_t queries() const { return heads / kv_heads * nodes; }  // of a key/value head
  bool is_many() const { return tree_mask == nullptr || nodes > kFewNodes; }
  int64_t part() const { return is_many() ? kManyPart : kPart; }
  int64_t parts() const { return (queries() + part() - 1) / part(); }
  int64_t units() const { return rows * kv_heads * parts(); }

  static constexpr int64_t kFewNodes = 64;  // up to which all scores of a few queries are held at once
  static constexpr int64_t kPart = 40, kManyPart = 192;  // queries of a unit of work
};

constexpr int64_t kFeatures = 16;
constexpr int64_t kPage = 64;

// Computes units [begin, end). False where memory is short.
using AttentionForm = bool (*)(const Attention&, int64_t begin, int64_t end);

bool portable_attention(const Attention&, int64_t begin, int64_t end);
bool avx2_attention(const Attention&, int64_t begin, int64_t end);
bool avx512_attention(const Attention&, int64_t begin, int64_t end);
bool neon_attention(const Attention&, int64_t begin, int64_t end);

}  // namespace specjax

#endif  // SPECJAX_CPU_ATTENTION_H_
