// Any processor: plain C++, which compilers make vectors of as far as they may.
#include "float_forms.h"
#include "int8_columns.h"

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
  static void looked_up(const uint8_t* at, const float* table, float scale, bool is_rounded, Vector& even, Vector& odd) {
    for (int i = 0; i < kWidth; i++) {
      even.v[i] = table[at[i] & 15] * scale;
      odd.v[i] = table[at[i] >> 4] * scale;
    }
    if (is_rounded) even = rounded(even), odd = rounded(odd);
  }
  static float scaled(int code, float scale, float bias) {  // a product of floats is exact
    return static_cast<float>(static_cast<double>(scale) * code + bias);
  }
};

struct PortableBytes {
  static constexpr int kLanes = 4, kTile = 4;
  static constexpr bool kSigned = false;
  struct Vector { float v[kLanes]; };
  struct Ints { uint8_t v[4 * kLanes]; };
  static Vector load(const float* at) {
    Vector a;
    std::memcpy(a.v, at, sizeof(a.v));
    return a;
  }
  static void store(float* to, Vector a) { std::memcpy(to, a.v, sizeof(a.v)); }
  static void store(uint8_t* to, Ints a) { std::memcpy(to, a.v, sizeof(a.v)); }
  static Vector all(float a) { return {{a, a, a, a}}; }
  static Vector mul(Vector a, Vector b) {
    for (int i = 0; i < kLanes; i++) a.v[i] *= b.v[i];
    return a;
  }
  static Vector fma(Vector a, Vector b, Vector c) {
    for (int i = 0; i < kLanes; i++) c.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
    return c;
  }
  static Ints low(Ints a) {
    for (uint8_t& each : a.v) each &= 15;
    return a;
  }
  static Ints high(Ints a) {
    for (uint8_t& each : a.v) each >>= 4;
    return a;
  }
  static Ints less_128(Ints a) { return a; }
  static void transposed(const uint8_t* const* rows, int64_t at, Ints* to) {
    for (int r = 0; r < kLanes; r++)
      for (int w = 0; w < kLanes; w++) std::memcpy(to[w].v + 4 * r, rows[r] + at + 4 * w, 4);
  }
  template <int C, int kBits>
  static void dots(const uint8_t* weights, const uint8_t* x, const uint8_t* more, Vector* to) {
    for (int c = 0; c < C; c++) {
      int32_t first, sums[kLanes] = {};
      std::memcpy(&first, more + 4 * c, 4);
      for (int w = 0; w < 8; w++)
        for (int r = 0; r < kLanes; r++)
          for (int i = 0; i < 4; i++)
            sums[r] += weights[4 * (w * kLanes + r) + i] * static_cast<int8_t>(x[4 * (w * C + c) + i]);
      for (int r = 0; r < kLanes; r++) to[c].v[r] = static_cast<float>(first + sums[r]);
    }
  }
};

}  // namespace

bool portable_attention(const Attention& call, int64_t begin, int64_t end) { return attention_units(call, begin, end); }

const Form* portable_form(const Call& call) {
  return call.quantized ? int8_form<PortableBytes>(call) : float_form<Portable>(call);
}

}  // namespace specjax
