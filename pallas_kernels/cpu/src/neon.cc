// 64-bit Arm, all of which have NEON.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "float_forms.h"
#include "neon_bytes.h"

namespace specjax {
namespace {
constexpr int kLanes = 4, kTile = 4, kAcross = 4;
}
}  // namespace specjax
#include "attention_blocks.h"

namespace specjax {
namespace {

struct Neon {
  static constexpr int kWidth = 8, kRows = 3, kRowsOfOne = 4;
  struct Vector { float32x4_t a, b; };
  static Vector zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
  static Vector load(const float* at) { return {vld1q_f32(at), vld1q_f32(at + 4)}; }
  static Vector fma(Vector a, Vector b, Vector c) { return {vfmaq_f32(c.a, a.a, b.a), vfmaq_f32(c.b, a.b, b.b)}; }
  static Vector rounded(Vector a) { return {rounded(a.a), rounded(a.b)}; }
  static float32x4_t rounded(float32x4_t a) {  // numbers alone: a scale times a code
    uint32x4_t bits = vreinterpretq_u32_f32(a), last = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    bits = vaddq_u32(bits, vaddq_u32(last, vdupq_n_u32(0x7fff)));
    return vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000u)));
  }
  static void store(float* to, Vector a) {
    vst1q_f32(to, a.a);
    vst1q_f32(to + 4, a.b);
  }
  static void totals(const Vector* sums, const float* scales, float* to) {
    for (int c = 0; c < 4; c++) to[c] = scales[c] * vaddvq_f32(vaddq_f32(sums[c].a, sums[c].b));
  }
  static void pair(const uint8_t* at, Vector& even, Vector& odd) {
    uint32x4_t low = vreinterpretq_u32_u8(vld1q_u8(at)), high = vreinterpretq_u32_u8(vld1q_u8(at + 16));
    uint32x4_t mask = vdupq_n_u32(0xffff0000u);
    even = {vreinterpretq_f32_u32(vshlq_n_u32(low, 16)), vreinterpretq_f32_u32(vshlq_n_u32(high, 16))};
    odd = {vreinterpretq_f32_u32(vandq_u32(low, mask)), vreinterpretq_f32_u32(vandq_u32(high, mask))};
  }
  static Vector codes(const uint8_t* at) { return scaled(vld1_u8(at), 1.0f, -128.0f); }
  static Vector bytes(const uint8_t* at, float scale, float bias) { return scaled(vld1_u8(at), scale, bias); }
  static void nibbles(const uint8_t* at, float scale, float bias, bool is_rounded, Vector& even, Vector& odd) {
    uint8x8_t both = vld1_u8(at);
    even = scaled(vand_u8(both, vdup_n_u8(15)), scale, bias);
    odd = scaled(vshr_n_u8(both, 4), scale, bias);
    if (is_rounded) even = rounded(even), odd = rounded(odd);
  }
  static void looked_up(const uint8_t* at, const float* table, float scale, bool is_rounded, Vector& even, Vector& odd) {
    float numbers[2][8];
    for (int i = 0; i < 8; i++) numbers[0][i] = table[at[i] & 15], numbers[1][i] = table[at[i] >> 4];
    float32x4_t each = vdupq_n_f32(scale);
    even = {vmulq_f32(vld1q_f32(numbers[0]), each), vmulq_f32(vld1q_f32(numbers[0] + 4), each)};
    odd = {vmulq_f32(vld1q_f32(numbers[1]), each), vmulq_f32(vld1q_f32(numbers[1] + 4), each)};
    if (is_rounded) even = rounded(even), odd = rounded(odd);
  }
  static Vector scaled(uint8x8_t codes, float scale, float bias) {
    uint16x8_t wide = vmovl_u8(codes);
    float32x4_t a = vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
    float32x4_t b = vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)));
    float32x4_t each = vdupq_n_f32(scale), more = vdupq_n_f32(bias);
    return {vfmaq_f32(more, a, each), vfmaq_f32(more, b, each)};
  }
};

}  // namespace

bool neon_attention(const Attention& call, int64_t begin, int64_t end) { return attention_units(call, begin, end); }

namespace {

// Two products of bytes less 128 fit 16 bits.
struct NeonProducts : NeonBytes {
  static int32x4_t dot(int32x4_t sum, int8x16_t a, int8x16_t b) {
    int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
  }
};

}  // namespace

const Form* neon_form(const Call& call) {
  return call.quantized ? int8_form<NeonDots<NeonProducts>>(call) : float_form<Neon>(call);
}

}  // namespace specjax
#else
#include "attention.h"
#include "matmul.h"
const specjax::Form* specjax::neon_form(const Call&) { return nullptr; }
bool specjax::neon_attention(const Attention&, int64_t, int64_t) { return false; }
#endif
