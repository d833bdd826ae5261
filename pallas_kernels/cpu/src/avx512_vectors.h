// Vectors of 16 float32 for x86-64 with AVX-512 (F, BW, DQ, VL).
#include <immintrin.h>

#define SPECJAX_F16C

#include "float_forms.h"
#include "int8_columns.h"

namespace specjax {
namespace {

struct Avx512 {
  static constexpr int kWidth = 16, kRows = 6, kRowsOfOne = 8;
  using Vector = __m512;
  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector load(const float* at) { return _mm512_loadu_ps(at); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static Vector rounded(Vector a) {  // numbers alone: a scale times a code
    __m512i bits = _mm512_castps_si512(a), last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static void store(float* to, Vector a) { _mm512_storeu_ps(to, a); }
  static void totals(const Vector* sums, const float* scales, float* to) {
    Vector a = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
    Vector b = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
    Vector all = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(to, _mm_mul_ps(sum, _mm_loadu_ps(scales)));
  }
  static void pair(const uint8_t* at, Vector& even, Vector& odd) {
    __m512i both = _mm512_loadu_si512(at);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static Vector codes(const uint8_t* at) {
    return _mm512_sub_ps(_mm512_cvtepi32_ps(lanes(at)), _mm512_set1_ps(128.0f));
  }
  static Vector bytes(const uint8_t* at, float scale, float bias) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(lanes(at)), _mm512_set1_ps(scale), _mm512_set1_ps(bias));
  }
  static void nibbles(const uint8_t* at, float scale, float bias, bool is_rounded, Vector& even, Vector& odd) {
    Vector numbers = of_codes(scale, bias);  // looked up by the lowest 4 bits of each lane
    if (is_rounded) numbers = rounded(numbers);
    __m512i both = lanes(at);
    even = _mm512_permutexvar_ps(both, numbers);
    odd = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), numbers);
  }
  static void looked_up(const uint8_t* at, const float* table, float scale, bool is_rounded, Vector& even, Vector& odd) {
    Vector numbers = of_table(table, scale);
    if (is_rounded) numbers = rounded(numbers);
    __m512i both = lanes(at);
    even = _mm512_permutexvar_ps(both, numbers);
    odd = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), numbers);
  }
  static Vector of_table(const float* table, float scale) {
    return _mm512_mul_ps(_mm512_loadu_ps(table), _mm512_set1_ps(scale));
  }
  static __m512i lanes(const uint8_t* at) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  // What the codes 0 to 15 stand for.
  static Vector of_codes(float scale, float bias) {
    Vector codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_fmadd_ps(codes, _mm512_set1_ps(scale), _mm512_set1_ps(bias));
  }
};

// What both kinds of sums of products of bytes have in common.
struct Avx512Ints {
  static constexpr int kLanes = 16, kTile = 8;
  using Vector = __m512;
  using Ints = __m512i;
  static Vector load(const float* at) { return _mm512_load_ps(at); }
  static void store(float* to, Vector a) { _mm512_store_ps(to, a); }
  static void store(uint8_t* to, Ints a) { _mm512_store_si512(to, a); }
  static Vector all(float a) { return _mm512_set1_ps(a); }
  static Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static Ints low(Ints a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
  static Ints high(Ints a) { return low(_mm512_srli_epi16(a, 4)); }
  static Ints less_128(Ints a) { return _mm512_xor_si512(a, _mm512_set1_epi8(-128)); }
  static Ints codes(const uint8_t* at) { return _mm512_load_si512(at); }
  static Ints word(const uint8_t* at) {
    int32_t own;
    std::memcpy(&own, at, 4);
    return _mm512_set1_epi32(own);
  }
  static void transposed(const uint8_t* const* rows, int64_t at, Ints* to) {
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; quarter++) {  // of rows; of four rows that are four apart in a vector
      Ints a[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) {
        auto piece = [&](int of) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r + of] + at) + quarter); };
        a[r] = _mm512_inserti32x4(_mm512_castsi128_si512(piece(0)), piece(4), 1);
        a[r] = _mm512_inserti32x4(_mm512_inserti32x4(a[r], piece(8), 2), piece(12), 3);
      }
      Ints low = _mm512_unpacklo_epi32(a[0], a[1]), high = _mm512_unpackhi_epi32(a[0], a[1]);
      Ints third = _mm512_unpacklo_epi32(a[2], a[3]), fourth = _mm512_unpackhi_epi32(a[2], a[3]);
      to[4 * quarter] = _mm512_unpacklo_epi64(low, third);
      to[4 * quarter + 1] = _mm512_unpackhi_epi64(low, third);
      to[4 * quarter + 2] = _mm512_unpacklo_epi64(high, fourth);
      to[4 * quarter + 3] = _mm512_unpackhi_epi64(high, fourth);
    }
  }
};

}  // namespace
}  // namespace specjax
