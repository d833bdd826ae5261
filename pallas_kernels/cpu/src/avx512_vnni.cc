// x86-64 with AVX-512 (F, BW, DQ, VL) and VNNI: sums of products of four bytes.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#endif
#include "avx512_vectors.h"

namespace specjax {
namespace {

struct Vnni : Avx512Ints {
  static constexpr bool kSigned = false;
  template <int C, int kBits>
  static void dots(const uint8_t* weights, const uint8_t* x, const uint8_t* more, Vector* to) {
    Ints sums[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sums[c] = word(more + 4 * c);
#pragma GCC unroll 8
    for (int w = 0; w < 8; w++) {
      Ints own = codes(weights + 64 * w);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[c] = _mm512_dpbusd_epi32(sums[c], own, word(x + 4 * (w * C + c)));
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) to[c] = _mm512_cvtepi32_ps(sums[c]);
  }
};

}  // namespace

const Form* avx512_vnni_form(const Call& call) { return call.quantized ? int8_form<Vnni>(call) : avx512_form(call); }

}  // namespace specjax
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "matmul.h"
const specjax::Form* specjax::avx512_vnni_form(const Call&) { return nullptr; }
#endif
