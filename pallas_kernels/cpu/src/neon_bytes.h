// Columns in 8 bits on 64-bit Arm. Included by the files of forms with and without sums of products of four bytes.
#include <arm_neon.h>

#include "int8_columns.h"

namespace specjax {
namespace {

struct NeonBytes {
  static constexpr int kLanes = 4, kTile = 8;
  static constexpr bool kSigned = true;
  using Vector = float32x4_t;
  using Ints = uint8x16_t;
  static Vector load(const float* at) { return vld1q_f32(at); }
  static void store(float* to, Vector a) { vst1q_f32(to, a); }
  static void store(uint8_t* to, Ints a) { vst1q_u8(to, a); }
  static Vector all(float a) { return vdupq_n_f32(a); }
  static Vector mul(Vector a, Vector b) { return vmulq_f32(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
  static Ints low(Ints a) { return vandq_u8(a, vdupq_n_u8(15)); }
  static Ints high(Ints a) { return vshrq_n_u8(a, 4); }
  static Ints less_128(Ints a) { return veorq_u8(a, vdupq_n_u8(128)); }
  static int32x4_t word(const uint8_t* at) {
    int32_t own;
    std::memcpy(&own, at, 4);
    return vdupq_n_s32(own);
  }
  static void transposed(const uint8_t* const* rows, int64_t at, Ints* to) {
    uint32x4_t a[4];
    for (int r = 0; r < 4; r++) a[r] = vreinterpretq_u32_u8(vld1q_u8(rows[r] + at));
    for (int half = 0; half < 2; half++) {
      uint32x4_t low = half ? vtrn2q_u32(a[0], a[1]) : vtrn1q_u32(a[0], a[1]);
      uint32x4_t high = half ? vtrn2q_u32(a[2], a[3]) : vtrn1q_u32(a[2], a[3]);
      uint64x2_t first = vreinterpretq_u64_u32(low), second = vreinterpretq_u64_u32(high);
      to[half] = vreinterpretq_u8_u64(vtrn1q_u64(first, second));
      to[half + 2] = vreinterpretq_u8_u64(vtrn2q_u64(first, second));
    }
  }
};

// With the sums of products of four bytes that `P` has.
template <class P>
struct NeonDots : P {
  using typename P::Vector;
  template <int C, int kBits>
  static void dots(const uint8_t* weights, const uint8_t* x, const uint8_t* more, Vector* to) {
    int32x4_t sums[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sums[c] = P::word(more + 4 * c);
#pragma GCC unroll 8
    for (int w = 0; w < 8; w++) {
      int8x16_t own = vreinterpretq_s8_u8(vld1q_u8(weights + 16 * w));
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[c] = P::dot(sums[c], own, vreinterpretq_s8_s32(P::word(x + 4 * (w * C + c))));
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) to[c] = vcvtq_f32_s32(sums[c]);
  }
};

}  // namespace
}  // namespace specjax
