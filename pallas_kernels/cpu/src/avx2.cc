// x86-64 with AVX2 and FMA.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,fma")
#endif
#include <immintrin.h>

#define SPECJAX_F16C  // which all processors with AVX2 have

#include "float_forms.h"
#include "int8_columns.h"

namespace specjax {
namespace {
constexpr int kLanes = 8, kTile = 4, kAcross = 2;
}
}  // namespace specjax
#include "attention_blocks.h"

namespace specjax {
namespace {

struct Avx2 {
  static constexpr int kWidth = 8, kRows = 3, kRowsOfOne = 4;
  using Vector = __m256;
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const float* at) { return _mm256_loadu_ps(at); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static Vector rounded(Vector a) {  // numbers alone: a scale times a code
    __m256i bits = _mm256_castps_si256(a), last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static void store(float* to, Vector a) { _mm256_storeu_ps(to, a); }
  static void totals(const Vector* sums, const float* scales, float* to) {
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    _mm_storeu_ps(to, _mm_mul_ps(sum, _mm_loadu_ps(scales)));
  }
  static void pair(const uint8_t* at, Vector& even, Vector& odd) {
    __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static Vector codes(const uint8_t* at) {
    return _mm256_sub_ps(_mm256_cvtepi32_ps(lanes(at)), _mm256_set1_ps(128.0f));
  }
  static Vector bytes(const uint8_t* at, float scale, float bias) {
    return scaled(lanes(at), scale, bias);
  }
  static void nibbles(const uint8_t* at, float scale, float bias, bool is_rounded, Vector& even, Vector& odd) {
    __m256i both = lanes(at);
    even = scaled(_mm256_and_si256(both, _mm256_set1_epi32(15)), scale, bias);
    odd = scaled(_mm256_srli_epi32(both, 4), scale, bias);
    if (is_rounded) even = rounded(even), odd = rounded(odd);
  }
  static void looked_up(const uint8_t* at, const float* table, float scale, bool is_rounded, Vector& even, Vector& odd) {
    Vector low = _mm256_mul_ps(_mm256_loadu_ps(table), _mm256_set1_ps(scale));
    Vector high = _mm256_mul_ps(_mm256_loadu_ps(table + 8), _mm256_set1_ps(scale));
    if (is_rounded) low = rounded(low), high = rounded(high);
    __m256i both = lanes(at);
    even = either(low, high, both), odd = either(low, high, _mm256_srli_epi32(both, 4));
  }
  static Vector either(Vector low, Vector high, __m256i codes) {  // by the lowest 3 bits of a lane, and the fourth
    Vector upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes), upper);
  }
  static __m256i lanes(const uint8_t* at) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
  }
  static Vector scaled(__m256i codes, float scale, float bias) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(scale), _mm256_set1_ps(bias));
  }
};

// Bytes less 128 are multiplied by their size, and columns by their sign: two products do not fit 16 bits otherwise. Those of
// halves of bytes, of 32 inputs, fit.
struct Avx2Bytes {
  static constexpr int kLanes = 8, kTile = 4;
  static constexpr bool kSigned = true;
  using Vector = __m256;
  using Ints = __m256i;
  static Vector load(const float* at) { return _mm256_load_ps(at); }
  static void store(float* to, Vector a) { _mm256_store_ps(to, a); }
  static void store(uint8_t* to, Ints a) { _mm256_store_si256(reinterpret_cast<Ints*>(to), a); }
  static Vector all(float a) { return _mm256_set1_ps(a); }
  static Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static Ints low(Ints a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
  static Ints high(Ints a) { return low(_mm256_srli_epi16(a, 4)); }
  static Ints less_128(Ints a) { return _mm256_xor_si256(a, _mm256_set1_epi8(-128)); }
  static Ints word(const uint8_t* at) {
    int32_t own;
    std::memcpy(&own, at, 4);
    return _mm256_set1_epi32(own);
  }
  static void transposed(const uint8_t* const* rows, int64_t at, Ints* to) {
    Ints a[8], b[8];
    for (int r = 0; r < 8; r++) a[r] = _mm256_loadu_si256(reinterpret_cast<const Ints*>(rows[r] + at));
#pragma GCC unroll 4
    for (int r = 0; r < 8; r += 2) {
      b[r] = _mm256_unpacklo_epi32(a[r], a[r + 1]);
      b[r + 1] = _mm256_unpackhi_epi32(a[r], a[r + 1]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < 8; r += 4) {  // four rows of every fourth word, within each half
      a[r] = _mm256_unpacklo_epi64(b[r], b[r + 2]);
      a[r + 1] = _mm256_unpackhi_epi64(b[r], b[r + 2]);
      a[r + 2] = _mm256_unpacklo_epi64(b[r + 1], b[r + 3]);
      a[r + 3] = _mm256_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
#pragma GCC unroll 4
    for (int w = 0; w < 4; w++) {  // then its halves
      to[w] = _mm256_permute2x128_si256(a[w], a[w + 4], 0x20);
      to[w + 4] = _mm256_permute2x128_si256(a[w], a[w + 4], 0x31);
    }
  }
  template <int C, int kBits>
  static void dots(const uint8_t* weights, const uint8_t* x, const uint8_t* more, Vector* to) {
    Ints sums[C], ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sums[c] = kBits == 8 ? word(more + 4 * c) : _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int w = 0; w < 8; w++) {
      Ints own = _mm256_load_si256(reinterpret_cast<const Ints*>(weights + 32 * w));
      Ints size = kBits == 8 ? _mm256_abs_epi8(own) : own;
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        Ints four = word(x + 4 * (w * C + c));
        if (kBits == 8) {
          Ints products = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four, own));
          sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(products, ones));
        } else {
          sums[c] = _mm256_add_epi16(sums[c], _mm256_maddubs_epi16(own, four));
        }
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      if (kBits == 4) sums[c] = _mm256_add_epi32(_mm256_madd_epi16(sums[c], ones), word(more + 4 * c));
      to[c] = _mm256_cvtepi32_ps(sums[c]);
    }
  }
};

}  // namespace

bool avx2_attention(const Attention& call, int64_t begin, int64_t end) { return attention_units(call, begin, end); }

const Form* avx2_form(const Call& call) { return call.quantized ? int8_form<Avx2Bytes>(call) : float_form<Avx2>(call); }

}  // namespace specjax
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "attention.h"
#include "matmul.h"
const specjax::Form* specjax::avx2_form(const Call&) { return nullptr; }
bool specjax::avx2_attention(const Attention&, int64_t, int64_t) { return false; }
#endif
