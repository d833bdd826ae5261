// Any processor: plain C++, which compilers make vectors of as far as they may.
#include "float_forms.h"

namespace specjax {
namespace {
constexpr int kLanes = 4, kTile = 4, kAcross = 2;
}
}  // namespace specjax
#include "attention_blocks.h"

namespace specjax {
namespace {

struct Portable {
  static constexpr int kWidth = 4, kRows = 2, kRowsOfOne = 2;
  struct Vector { float v[kWidth]; };
  static Vector zero() { return {}; }
  static Vector load(const float* at) {
    Vector a;
    std::memcpy(a.v, at, sizeof(a.v));
    return a;
  }
  static Vector fma(Vector a, Vector b, Vector c) {
    for (int i = 0; i < kWidth; i++) c.v[i] += a.v[i] * b.v[i];
    return c;
  }
  static Vector rounded(Vector a) {
    for (float& each : a.v) each = widened(rounded_bits(each));
    return a;
  }
  static void store(float* to, Vector a) { std::memcpy(to, a.v, sizeof(a.v)); }
  static void totals(const Vector* sums, const float* scales, float* to) {
    for (int c = 0; c < 4; c++) to[c] = scales[c] * ((sums[c].v[0] + sums[c].v[1]) + (sums[c].v[2] + sums[c].v[3]));
  }
  static void pair(const uint8_t* at, Vector& even, Vector& odd) {
    for (int i = 0; i < kWidth; i++) {
      uint16_t bits[2];
      std::memcpy(bits, at + 4 * i, 4);
      even.v[i] = widened(bits[0]);
      odd.v[i] = widened(bits[1]);
    }
  }
  static Vector codes(const uint8_t* at) {
    Vector a;
    for (int i = 0; i < kWidth; i++) a.v[i] = static_cast<float>(at[i] - 128);
    return a;
  }
  static Vector bytes(const uint8_t* at, float scale, float bias) {
    Vector a;
    for (int i = 0; i < kWidth; i++) a.v[i] = scaled(at[i], scale, bias);
    return a;
  }
  static void nibbles(const uint8_t* at, float scale, float bias, bool is_rounded, Vector& even, Vector& odd) {
    for (int i = 0; i < kWidth; i++) {
      even.v[i] = scaled(at[i] & 15, scale, bias);
      odd.v[i] = scaled(at[i] >> 4, scale, bias);
    }
    if (is_rounded) even = rounded(even), odd = rounded(odd);
  }
  static float scaled(int code, float scale, float bias) {  // a product of floats is exact
    return static_cast<float>(static_cast<double>(scale) * code + bias);
  }
};

}  // namespace

bool portable_attention(const Attention& call, int64_t begin, int64_t end) { return attention_units(call, begin, end); }

const Form* portable_form(const Call& call) { return float_form<Portable>(call); }

}  // namespace specjax
