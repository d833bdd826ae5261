// Weights times few columns, float32 sums: what a call is, and what a form for one kind of processor offers.
#ifndef SPECJAX_CPU_MATMUL_H_
#define SPECJAX_CPU_MATMUL_H_

#include <cstddef>
#include <cstdint>

namespace specjax {

enum Format : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3, kFormats = 4 };
enum ScaleType : int { kScaleFloat32 = 0, kScaleBfloat16 = 1, kScaleFloat16 = 2, kScaleTypes = 3 };

constexpr int64_t kUnit = 32, kHalf = 16;  // inputs

// out[o, n] = sum over i of weights[o, i] * x[i, n], rows after one another in memory.
// Codes stand for scale * (code - middle), middle 128 or 8, or for scale * code + offset; of two in a byte the first has the
// lower bits. A scale, and an offset, is that of a group of inputs, or of all in a row; of codes of 8 bits with a scale a row
// and no offset it is the sums that are multiplied. Groups are multiples of kUnit inputs, or of kHalf where codes are of 8
// bits and x is not quantized. Codes of 4 bits may have a table, and stand for scale * table[code] then.
struct Call {
  Format format;
  bool rounded;    // x to bfloat16, and the numbers that codes stand for where it is not sums that are multiplied
  bool quantized;  // x to 8 bits, kUnit inputs of a column with a scale; of codes alone, and not `rounded` too
  int64_t outputs, inputs, columns;
  const uint8_t* weights;
  const void* scale;   // [outputs, groups], of codes alone
  const void* offset;  // the same, or null
  const float* table;  // [16], of codes of 4 bits without offsets, or null
  ScaleType scale_type;  // of both
  int64_t groups;
  const float* x;
  float* out;

  int64_t row_bytes() const {
    switch (format) {
      case kFloat32: return inputs * 4;
      case kBfloat16: return inputs * 2;
      case kInt8: return inputs;
      default: return inputs / 2;
    }
  }
  bool is_coded() const { return format == kInt8 || format == kInt4; }
  bool is_halved() const { return groups > 1 && inputs / groups % kUnit != 0; }  // groups are no multiples of kUnit
  bool scales_sums() const { return format == kInt8 && groups == 1 && offset == nullptr; }
  int64_t scale_bytes() const { return groups * (scale_type == kScaleFloat32 ? 4 : 2); }  // of a row

  // To the weights behind so many others.
  void skip(int64_t count) {
    weights += count * outputs * row_bytes();
    if (scale != nullptr) scale = static_cast<const uint8_t*>(scale) + count * outputs * scale_bytes();
    if (offset != nullptr) offset = static_cast<const uint8_t*>(offset) + count * outputs * scale_bytes();
  }

  // To the next of several that lie behind one another.
  void step() {
    skip(1);
    if (table != nullptr) table += 16;
    x += inputs * columns;
    out += outputs * columns;
  }
};

// A form for one format. `pack` lays x out as `rows` reads it; `rows` computes some of the outputs.
struct Form {
  size_t (*packed_bytes)(const Call&);
  void (*pack)(const Call&, uint8_t* packed);
  void (*rows)(const Call&, const uint8_t* packed, int64_t begin, int64_t end);
};

// Whether the processor at hand runs them is asked elsewhere; null where its family does not.
const Form* portable_form(const Call&);
const Form* avx2_form(const Call&);
const Form* avx512_form(const Call&);
const Form* avx512_vnni_form(const Call&);
const Form* avx512_bf16_form(const Call&);
const Form* neon_form(const Call&);
const Form* neon_dotprod_form(const Call&);

constexpr size_t kAlign = 64;
constexpr int64_t kMostColumns = 64;

}  // namespace specjax

#endif  // SPECJAX_CPU_MATMUL_H_
