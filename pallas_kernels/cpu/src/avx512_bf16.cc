// x86-64 with AVX512-BF16: products of pairs of bfloat16, summed in float32.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")
#endif
#include "avx512_vectors.h"

namespace specjax {
namespace {

inline __m512bh bits(const uint8_t* at) { return (__m512bh)_mm512_loadu_si512(at); }
inline __m512bh pairs(__m512 first, __m512 second) { return _mm512_cvtne2ps_pbh(second, first); }

struct Bfloat16Pairs {
  using Scales = NoScale;
  using Weights = __m512bh;
  using X = __m512bh;
  using Sum = __m512;
  static constexpr int kBlock = 32, kBytes = 64, kReadyBytes = 64, kXBytes = 64, kRows = 6, kRowsOfOne = 8;
  static constexpr int kMostAsCodes = kColumns;
  static constexpr bool kPacksBfloat16 = true;
  static void pack(const float* turned, uint8_t* to) {
    __m512bh both = pairs(_mm512_loadu_ps(turned), _mm512_loadu_ps(turned + 16));
    std::memcpy(to, &both, 64);
  }
  static X load_x(const uint8_t* at) { return bits(at); }
  static Weights load(const uint8_t* at, const Scales&, OfBlock) { return bits(at); }
  static Weights ready(const uint8_t* at) { return bits(at); }
  static void store(const Weights& w, uint8_t* to) { std::memcpy(to, &w, 64); }
  static void clear(Sum& sum) { sum = _mm512_setzero_ps(); }
  static void dot(Sum& sum, const Weights& w, const X& x) { sum = _mm512_dpbf16_ps(sum, w, x); }
  static void totals(const Sum* sums, const float* scales, float* to) { Avx512::totals(sums, scales, to); }
};

// Codes of 8 bits, which are integers that bfloat16 holds exactly.
struct Int8Pairs : Bfloat16Pairs {
  using Scales = RowScale;
  static constexpr int kBytes = 32;
  // Two codes a lane. Either becomes the last bits of a float of which they are the units, and which less 128 is the
  // number; its lower half is 0.
  static Weights load(const uint8_t* at, const Scales&, OfBlock) {
    __m512i both = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    __m512i first = _mm512_set1_epi32(0x4b000000), second = _mm512_set1_epi32(0x47000000);  // 2 to the 23rd and 15th
    __m512i even = _mm512_ternarylogic_epi32(both, _mm512_set1_epi32(0xff), first, 0xea);  // a and b, or c
    __m512i odd = _mm512_ternarylogic_epi32(both, _mm512_set1_epi32(0xff00), second, 0xea);
    __m512 low = _mm512_sub_ps(_mm512_castsi512_ps(even), _mm512_set1_ps(8388608.0f + 128));
    __m512 high = _mm512_sub_ps(_mm512_castsi512_ps(odd), _mm512_set1_ps(32768.0f + 128));
    return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
  }
};

// Codes of 8 bits times the scale of their group, which is theirs alone, are rounded to bfloat16.
template <class Own>
struct Int8GroupPairs : Bfloat16Pairs {
  using Scales = Own;
  static constexpr int kBytes = 32;
  static Weights load(const uint8_t* at, const Scales& scales, OfBlock group) {
    int64_t second = Own::kInputs == 16 ? group.second : group.first;
    return pairs(Avx512::bytes(at, scales.scale[group.first], scales.bias[group.first]),
                 Avx512::bytes(at + 16, scales.scale[second], scales.bias[second]));
  }
};

// Codes of 4 bits, the inputs of even places, then those of odd ones. A block has one group or two.
struct Int4Pairs {
  using Scales = GroupScales;
  struct Weights { __m512bh even, odd; };
  using X = Weights;
  using Sum = __m512;
  static constexpr int kBlock = 64, kBytes = 32, kReadyBytes = 128, kXBytes = 128, kRows = 6, kRowsOfOne = 8;
  static constexpr int kMostAsCodes = kColumns;
  static constexpr bool kPacksBfloat16 = true;
  static void pack(const float* turned, uint8_t* to) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    __m512 part[4];
    for (int i = 0; i < 4; i++) part[i] = _mm512_loadu_ps(turned + 16 * i);
    auto half = [&](const __m512i& which) {
      return pairs(_mm512_permutex2var_ps(part[0], which, part[1]), _mm512_permutex2var_ps(part[2], which, part[3]));
    };
    __m512bh numbers[2] = {half(even), half(odd)};
    std::memcpy(to, numbers, 128);
  }
  static X load_x(const uint8_t* at) { return ready(at); }
  static Weights load(const uint8_t* at, const Scales& scales, OfBlock group) {
    return looked_up(at, pairs(Avx512::of_codes(scales.scale[group.first], scales.bias[group.first]),
                               Avx512::of_codes(scales.scale[group.second], scales.bias[group.second])));
  }
  // By the lowest 5 bits of each lane, of which the fifth says the half, and so the group.
  static Weights looked_up(const uint8_t* at, __m512bh both) {
    __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    __m512i numbers = (__m512i)both;
    __m512i half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    __m512i even = _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi16(15), half, 0xea);  // a and b, or c
    __m512i odd = _mm512_or_si512(_mm512_srli_epi16(bytes, 4), half);
    return {(__m512bh)_mm512_permutexvar_epi16(even, numbers), (__m512bh)_mm512_permutexvar_epi16(odd, numbers)};
  }
  static Weights ready(const uint8_t* at) { return {bits(at), bits(at + 64)}; }
  static void store(const Weights& w, uint8_t* to) { std::memcpy(to, &w, 128); }
  static void clear(Sum& sum) { sum = _mm512_setzero_ps(); }
  static void dot(Sum& sum, const Weights& w, const X& x) {
    sum = _mm512_dpbf16_ps(_mm512_dpbf16_ps(sum, w.even, x.even), w.odd, x.odd);
  }
  static void totals(const Sum* sums, const float* scales, float* to) { Avx512::totals(sums, scales, to); }
};

struct Int4TablePairs : Int4Pairs {
  using Scales = TableScales;
  static Weights load(const uint8_t* at, const Scales& scales, OfBlock group) {
    return looked_up(at, pairs(Avx512::of_table(scales.table, scales.scale[group.first]),
                               Avx512::of_table(scales.table, scales.scale[group.second])));
  }
};

}  // namespace

const Form* avx512_bf16_form(const Call& call) {
  static constexpr Form bfloat16 = Driver<Bfloat16Pairs>::form(), int8 = Driver<Int8Pairs>::form(),
                        groups = Driver<Int8GroupPairs<GroupScales>>::form(),
                        halves = Driver<Int8GroupPairs<HalfScales>>::form(), int4 = Driver<Int4Pairs>::form(),
                        tables = Driver<Int4TablePairs>::form();
  if (call.quantized) return avx512_vnni_form(call);  // which all of these processors have
  if (!call.rounded || call.format == kFloat32) return float_form<Avx512>(call);
  if (call.format == kBfloat16) return &bfloat16;
  if (call.format == kInt4) return call.table == nullptr ? &int4 : &tables;
  if (call.scales_sums()) return &int8;
  return call.is_halved() ? &halves : &groups;
}

}  // namespace specjax
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "matmul.h"
const specjax::Form* specjax::avx512_bf16_form(const Call&) { return nullptr; }
#endif
