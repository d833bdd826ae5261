// x86-64 with AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#include "avx512_vectors.h"

namespace specjax {
namespace {
constexpr int kLanes = 16, kTile = 5, kAcross = 4;
}
}  // namespace specjax
#include "attention_blocks.h"

namespace specjax {

namespace {

// Bytes less 128 are multiplied by their size, and columns by their sign: two products do not fit 16 bits otherwise. Those of
// halves of bytes, of 32 inputs, fit.
struct Avx512Bytes : Avx512Ints {
  static constexpr bool kSigned = true;
  template <int C, int kBits>
  static void dots(const uint8_t* weights, const uint8_t* x, const uint8_t* more, Vector* to) {
    Ints sums[C], ones = _mm512_set1_epi16(1);
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sums[c] = kBits == 8 ? word(more + 4 * c) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int w = 0; w < 8; w++) {
      Ints own = codes(weights + 64 * w), size = kBits == 8 ? _mm512_abs_epi8(own) : own;
      __mmask64 below = _mm512_movepi8_mask(own);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        Ints four = word(x + 4 * (w * C + c));
        if (kBits == 8) {
          Ints turned = _mm512_mask_sub_epi8(four, below, _mm512_setzero_si512(), four);
          sums[c] = _mm512_add_epi32(sums[c], _mm512_madd_epi16(_mm512_maddubs_epi16(size, turned), ones));
        } else {
          sums[c] = _mm512_add_epi16(sums[c], _mm512_maddubs_epi16(own, four));
        }
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      if (kBits == 4) sums[c] = _mm512_add_epi32(_mm512_madd_epi16(sums[c], ones), word(more + 4 * c));
      to[c] = _mm512_cvtepi32_ps(sums[c]);
    }
  }
};

}  // namespace

const Form* avx512_form(const Call& call) {
  return call.quantized ? int8_form<Avx512Bytes>(call) : float_form<Avx512>(call);
}
bool avx512_attention(const Attention& call, int64_t begin, int64_t end) { return attention_units(call, begin, end); }

}  // namespace specjax
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "attention.h"
#include "matmul.h"
const specjax::Form* specjax::avx512_form(const Call&) { return nullptr; }
bool specjax::avx512_attention(const Attention&, int64_t, int64_t) { return false; }
#endif
