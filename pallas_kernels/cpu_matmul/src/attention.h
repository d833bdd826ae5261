// Attention of a tree's nodes to a cached prefix and to the block of keys that they may see, in float32.
#ifndef SPECJAX_CPU_ATTENTION_H_
#define SPECJAX_CPU_ATTENTION_H_

#include <cstddef>
#include <cstdint>

namespace specjax {

// Arrays lie row after row. Query head h uses key/value head h / (heads / kv_heads); the keys of the prefix are
// stored transposed. A node sees the slots of its row's prefix from `first` to `length`, and block columns where
// `tree_mask` is not 0; what it does not see may hold anything.
struct Attention {
  int64_t rows, heads, kv_heads, nodes, columns, slots, dim;  // dim a multiple of kFeatures
  const float* query;         // [heads, dim, rows, nodes]: features first, as activations are
  const float* block_keys;    // [rows, kv_heads, columns, dim]
  const float* block_values;  // the same
  const uint8_t* tree_mask;   // [rows, nodes, columns]
  const float* keys;          // [rows, kv_heads, dim, slots]; null without a prefix
  const float* values;        // [rows, kv_heads, slots, dim]
  const int32_t* length;      // [rows]
  const int32_t* first;       // [rows, nodes], or null for 0
  float scale;                // of scores
  float* out;                 // [heads, dim, rows, nodes]

  int64_t queries() const { return heads / kv_heads * nodes; }  // of a key/value head
  int64_t parts() const { return (queries() + kPart - 1) / kPart; }
  int64_t units() const { return rows * kv_heads * parts(); }

  static constexpr int64_t kPart = 40;  // queries of a unit of work
};

constexpr int64_t kFeatures = 16;

// Computes units [begin, end). False where memory is short.
using AttentionForm = bool (*)(const Attention&, int64_t begin, int64_t end);

bool portable_attention(const Attention&, int64_t begin, int64_t end);
bool avx2_attention(const Attention&, int64_t begin, int64_t end);
bool avx512_attention(const Attention&, int64_t begin, int64_t end);
bool neon_attention(const Attention&, int64_t begin, int64_t end);

}  // namespace specjax

#endif  // SPECJAX_CPU_ATTENTION_H_
