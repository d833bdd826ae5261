// Arithmetic in float32 on vectors `V`, which widens codes and bfloat16 as it reads them.
//
// A `V` says: kWidth, kRows, kRowsOfOne; Vector, zero(), load(const float*), store(float*, Vector),
// fma(a, b, c), rounded(Vector) to bfloat16, totals(const Vector[4], scales, float[4]); pair(const uint8_t*, &even, &odd)
// of 2 * kWidth bfloat16; codes(const uint8_t*), the numbers of kWidth bytes less 128; bytes(const uint8_t*, scale, bias),
// what they are times a scale plus a bias, rounded once; and nibbles(const uint8_t*, scale, bias, bool rounded, &even, &odd),
// the same of two codes in each byte, to bfloat16 where that is asked for; looked_up(const uint8_t*, const float table[16],
// scale, bool rounded, &even, &odd), those of a table times a scale.
#include "tile.h"

namespace specjax {
namespace {

template <class V>
struct Float32 {
  using Vector = typename V::Vector;
  using Scales = NoScale;
  using Weights = Vector;
  using X = Vector;
  using Sum = Vector;
  static constexpr int kBlock = V::kWidth, kBytes = 4 * V::kWidth, kReadyBytes = kBytes, kXBytes = kBytes;
  static constexpr int kRows = V::kRows, kRowsOfOne = V::kRowsOfOne, kMostAsCodes = 2 * kColumns;
  static constexpr bool kPacksBfloat16 = false;
  static void pack(const float* turned, uint8_t* to) { std::memcpy(to, turned, kXBytes); }
  static X load_x(const uint8_t* at) { return V::load(reinterpret_cast<const float*>(at)); }
  static Weights load(const uint8_t* at, const Scales&, OfBlock) { return ready(at); }
  static Weights ready(const uint8_t* at) { return V::load(reinterpret_cast<const float*>(at)); }
  static void store(const Weights& w, uint8_t* to) { V::store(reinterpret_cast<float*>(to), w); }
  static void clear(Sum& sum) { sum = V::zero(); }
  static void dot(Sum& sum, const Weights& w, const X& x) { sum = V::fma(w, x, sum); }
  static void totals(const Sum* sums, const float* scales, float* to) { V::totals(sums, scales, to); }
};

template <class V>
struct Int8 : Float32<V> {
  using Scales = RowScale;
  static constexpr int kBytes = V::kWidth;
  static typename V::Vector load(const uint8_t* at, const Scales&, OfBlock) { return V::codes(at); }
};

// Two vectors a block: the inputs of even places, then those of odd ones.
template <class V>
struct Bfloat16 {
  using Vector = typename V::Vector;
  using Scales = NoScale;
  struct Weights { Vector even, odd; };
  using X = Weights;
  using Sum = Vector;
  static constexpr int kBlock = 2 * V::kWidth, kBytes = 4 * V::kWidth, kReadyBytes = kBytes;
  static constexpr int kXBytes = 8 * V::kWidth, kRows = V::kRows, kRowsOfOne = V::kRowsOfOne;
  static constexpr int kMostAsCodes = 2 * kColumns;
  static constexpr bool kPacksBfloat16 = false;
  static void pack(const float* turned, uint8_t* to) {
    auto out = reinterpret_cast<float*>(to);
    for (int i = 0; i < V::kWidth; i++) {
      out[i] = turned[2 * i];
      out[V::kWidth + i] = turned[2 * i + 1];
    }
  }
  static X load_x(const uint8_t* at) { return ready(at); }
  static Weights load(const uint8_t* at, const Scales&, OfBlock) {
    Weights w;
    V::pair(at, w.even, w.odd);
    return w;
  }
  static Weights ready(const uint8_t* at) {
    auto numbers = reinterpret_cast<const float*>(at);
    return {V::load(numbers), V::load(numbers + V::kWidth)};
  }
  static void store(const Weights& w, uint8_t* to) {
    auto out = reinterpret_cast<float*>(to);
    V::store(out, w.even);
    V::store(out + V::kWidth, w.odd);
  }
  static void clear(Sum& sum) { sum = V::zero(); }
  static void dot(Sum& sum, const Weights& w, const X& x) {
    sum = V::fma(w.odd, x.odd, V::fma(w.even, x.even, sum));
  }
  static void totals(const Sum* sums, const float* scales, float* to) { V::totals(sums, scales, to); }
};

template <class V, bool kRounded>
struct Int4 : Bfloat16<V> {
  using typename Bfloat16<V>::Weights;
  using Scales = GroupScales;
  static constexpr int kBytes = V::kWidth, kReadyBytes = 8 * V::kWidth, kRowsOfOne = 4;
  static Weights load(const uint8_t* at, const Scales& scales, OfBlock group) {
    Weights w;
    V::nibbles(at, scales.scale[group.first], scales.bias[group.first], kRounded, w.even, w.odd);
    return w;
  }
};

template <class V, bool kRounded>
struct Int4Table : Int4<V, kRounded> {
  using typename Bfloat16<V>::Weights;
  using Scales = TableScales;
  static Weights load(const uint8_t* at, const Scales& scales, OfBlock group) {
    Weights w;
    V::looked_up(at, scales.table, scales.scale[group.first], kRounded, w.even, w.odd);
    return w;
  }
};

// Two vectors a block, which have one scale, or of halves of units one each where they are as long.
template <class V, bool kRounded, class Own = GroupScales>
struct Int8Groups : Bfloat16<V> {
  using typename Bfloat16<V>::Weights;
  using Scales = Own;
  static constexpr int kBytes = 2 * V::kWidth, kReadyBytes = 8 * V::kWidth, kRowsOfOne = 4;
  static void pack(const float* turned, uint8_t* to) { std::memcpy(to, turned, 8 * V::kWidth); }
  static Weights load(const uint8_t* at, const Scales& scales, OfBlock group) {
    int64_t second = Own::kInputs == V::kWidth ? group.second : group.first;
    Weights w = {V::bytes(at, scales.scale[group.first], scales.bias[group.first]),
                 V::bytes(at + V::kWidth, scales.scale[second], scales.bias[second])};
    if (kRounded) w = {V::rounded(w.even), V::rounded(w.odd)};
    return w;
  }
};

template <class V>
const Form* float_form(const Call& call) {
  static constexpr Form whole[kFormats] = {
      Driver<Float32<V>>::form(),
      Driver<Bfloat16<V>>::form(),
      Driver<Int8<V>>::form(),
      Driver<Int4<V, false>>::form(),
  };
  static constexpr Form rounded = Driver<Int4<V, true>>::form();
  static constexpr Form groups[2] = {Driver<Int8Groups<V, false>>::form(), Driver<Int8Groups<V, true>>::form()};
  static constexpr Form halves[2] = {Driver<Int8Groups<V, false, HalfScales>>::form(),
                                     Driver<Int8Groups<V, true, HalfScales>>::form()};
  static constexpr Form tables[2] = {Driver<Int4Table<V, false>>::form(), Driver<Int4Table<V, true>>::form()};
  if (call.format == kInt4 && call.table != nullptr) return &tables[call.rounded];
  if (call.format == kInt4 && call.rounded) return &rounded;
  if (call.format != kInt8 || call.scales_sums()) return &whole[call.format];
  return call.is_halved() ? &halves[call.rounded] : &groups[call.rounded];
}

}  // namespace
}  // namespace specjax
