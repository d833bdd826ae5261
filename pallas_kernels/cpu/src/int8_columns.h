// Columns in 8 bits times codes. Each 32 inputs of a column are `scale * q`, of integers q of at most 127, and their products
// with codes are summed as integers, which no order changes; these sums times both scales are added in float32, those of
// even places and those of odd ones, in the order of the inputs. So what a column gives depends on nothing else, and is the
// same in every form, to the bit.
//
// A form `V` says, of vectors of kLanes rows: kTile columns that are multiplied together; kSigned, whether codes of 8 bits
// are multiplied less 128; Vector of floats: load, store, zero, all(float), mul, fma; Ints: transposed(rows, at, Ints[kLanes]),
// the words of four bytes of kLanes rows, a vector for each; store(to, Ints), low(Ints), high(Ints), the halves of bytes; and
// dots<C, bits>(weights, x, more, Vector[C]), sums of 32 inputs as floats, and of `more`.
#include <cmath>

#include "tile.h"

namespace specjax {
namespace {

// What a unit of a tile of C columns is packed as: codes [8][C], words of four inputs; scales [C]; what is added to sums [C];
// and what the sum of a column's numbers is [C].
constexpr int64_t kUnitBytes = kUnit + 12;  // of a column

// The widest tile that so many columns have, of 8, 4, 2 and 1.
template <int kTile>
inline int tile_of(int64_t columns) {
  int tile = kTile;
  while (tile > columns) tile /= 2;
  return tile;
}

// Where an input of a unit is among its packed codes: of 4 bits the lower halves of four bytes, then the upper ones.
template <int kBits>
constexpr int place_of(int input) {
  return kBits == 8 ? input : input / 8 * 8 + input % 2 * 4 + input % 8 / 2;
}

// Packs up to kUnit inputs of C columns; `more` is what each sum is to be added for each q.
template <int C, int kBits>
inline void pack_unit(const float* x, int64_t stride, int64_t count, int more, uint8_t* to) {
  uint32_t most[C] = {};
  alignas(kAlign) uint32_t bits[kUnit][C] = {};
  for (int64_t i = 0; i < count; i++) std::memcpy(bits[i], x + i * stride, 4 * C);
  for (int i = 0; i < kUnit; i++)
    for (int c = 0; c < C; c++) most[c] = (bits[i][c] & 0x7fffffffu) > most[c] ? bits[i][c] & 0x7fffffffu : most[c];
  float inverse[C], scale[C];
  uint32_t kept[C];
  for (int c = 0; c < C; c++) {
    float size;
    std::memcpy(&size, most + c, 4);
    bool is_number = most[c] < 0x7f800000u, is_zero = size < 1e-30f;  // whose inverse may be none
    kept[c] = is_number && !is_zero ? 0xffffffffu : 0;
    inverse[c] = kept[c] ? 127 / size : 0;
    scale[c] = is_number ? size / 127 : NAN;
  }
  alignas(kAlign) int32_t codes[kUnit][C];
  int32_t sums[C] = {};
  for (int i = 0; i < kUnit; i++)
    for (int c = 0; c < C; c++) {
      uint32_t own = bits[i][c] & kept[c];
      float number;
      std::memcpy(&number, &own, 4);
      codes[i][c] = static_cast<int32_t>(__builtin_rintf(number * inverse[c]));
      sums[c] += codes[i][c];
    }
  if (C == 1) {
    int8_t bytes[kUnit];
    for (int i = 0; i < kUnit; i++) bytes[i] = static_cast<int8_t>(codes[i][0]);
    for (int i = 0; i < kUnit; i++) to[place_of<kBits>(i)] = static_cast<uint8_t>(bytes[i]);
  } else {
    alignas(kAlign) uint32_t words[kUnit / 4][C] = {};
    for (int i = 0; i < kUnit; i++)
      for (int c = 0; c < C; c++)
        words[place_of<kBits>(i) / 4][c] |= static_cast<uint32_t>(codes[i][c] & 255) << place_of<kBits>(i) % 4 * 8;
    std::memcpy(to, words, kUnit * C);
  }
  int32_t added[C];
  float of_sums[C];
  for (int c = 0; c < C; c++) added[c] = more * sums[c], of_sums[c] = scale[c] * static_cast<float>(sums[c]);
  std::memcpy(to + kUnit * C, scale, 4 * C);
  std::memcpy(to + (kUnit + 4) * C, added, 4 * C);
  std::memcpy(to + (kUnit + 8) * C, of_sums, 4 * C);
}

template <class V, int kBits>
struct Int8Columns {
  using Vector = typename V::Vector;
  using Ints = typename V::Ints;
  static constexpr int kLanes = V::kLanes, kSpan = 32;  // units that are unpacked at a time
  static constexpr int kChunk = 4 * kLanes;             // bytes of a row that are transposed together
  static constexpr int kFew = 2;                        // columns up to which time goes by while codes are unpacked
  static constexpr int kUnitCodes = kUnit * kBits / 8;  // bytes of a unit of a row

  static int64_t units(const Call& call) { return ceil_div(call.inputs, kUnit); }

  static size_t packed_bytes(const Call& call) { return units(call) * kUnitBytes * call.columns; }

  template <int C>
  static void pack_tile(const Call& call, int64_t column, uint8_t* to) {
    int middle = call.offset != nullptr ? 0 : kBits == 8 ? 128 : 8, less = kBits == 8 && V::kSigned ? 128 : 0;
    for (int64_t u = 0; u < units(call); u++, to += kUnitBytes * C) {
      int64_t left = call.inputs - u * kUnit;
      pack_unit<C, kBits>(call.x + u * kUnit * call.columns + column, call.columns, left < kUnit ? left : kUnit,
                          less - middle, to);
    }
  }

  // Calls with<C>(first column) for each tile.
  template <class With>
  static void tiles(const Call& call, With with) {
    for (int64_t column = 0; column < call.columns;) {
      int tile = tile_of<V::kTile>(call.columns - column);
      with(tile, column);
      column += tile;
    }
  }

  static void pack(const Call& call, uint8_t* packed) {
    tiles(call, [&](int tile, int64_t column) {
      uint8_t* to = packed + column * units(call) * kUnitBytes;
      switch (tile) {
        case 1: return pack_tile<1>(call, column, to);
        case 2: return pack_tile<2>(call, column, to);
        case 4: return pack_tile<4>(call, column, to);
        default: return pack_tile<V::kTile>(call, column, to);
      }
    });
  }

  // kLanes rows, the last one again where there are fewer, as far as they are unpacked.
  struct Strip {
    const uint8_t* rows[kLanes];
    const void *scales[kLanes], *offsets[kLanes];
    alignas(kAlign) uint8_t codes[kSpan * kLanes * kUnit];
    alignas(kAlign) float scale[kSpan * kLanes], offset[kSpan * kLanes];
    alignas(kAlign) float sums[kMostColumns][2][kLanes];
  };

  // The codes of a span: for each four inputs those of all rows beside each other.
  static void unpack(const Call& call, Strip& strip, int64_t first, int64_t count) {
    int64_t row_bytes = call.row_bytes(), at = first * kUnitCodes, end = at + count * kUnitCodes;
    // What follows a row is read with its end: codes of other rows, which are multiplied by 0.
    int64_t held = call.weights + call.outputs * row_bytes - strip.rows[kLanes - 1];
    uint8_t* to = strip.codes;
    const uint8_t* ahead = strip.rows[0] + kLanes * (row_bytes + at);
    for (; at < end; at += kChunk) {
      Ints words[kLanes];
      for (int line = 0; call.columns <= kFew && line < kLanes * kChunk; line += 64, ahead += 64)
        __builtin_prefetch(ahead, 0, 2);
      if (at + kChunk <= held) {
        V::transposed(strip.rows, at, words);
      } else {
        alignas(kAlign) uint8_t tail[kLanes][kChunk] = {};
        const uint8_t* rows[kLanes];
        for (int r = 0; r < kLanes; r++) {
          rows[r] = tail[r];
          if (at < row_bytes) std::memcpy(tail[r], strip.rows[r] + at, row_bytes - at < kChunk ? row_bytes - at : kChunk);
        }
        V::transposed(rows, 0, words);
      }
      for (int w = 0; w < kLanes; w++) {
        if (kBits == 8) {
          V::store(to, V::kSigned ? V::less_128(words[w]) : words[w]);
          to += kChunk;
        } else {
          V::store(to, V::low(words[w]));
          V::store(to + kChunk, V::high(words[w]));
          to += 2 * kChunk;
        }
      }
    }
  }

  // The scales of a span's units, or the offsets: for each unit those of all rows beside each other.
  static void spread(const Call& call, const void* const* from, int64_t first, int64_t count, float* to) {
    Groups groups(call);
    int64_t base = groups.of(first), of_span = groups.of(first + count - 1) - base + 1;
    alignas(kAlign) float wide[kLanes][kSpan] = {}, each[kSpan];
    const uint8_t* rows[kLanes];
    for (int r = 0; r < kLanes; r++) {
      rows[r] = reinterpret_cast<const uint8_t*>(wide[r]);
      if (of_span == count) {
        widen(call.scale_type, from[r], base, count, wide[r]);
      } else {
        widen(call.scale_type, from[r], base, of_span, each);
        for (int64_t u = 0; u < count; u++) wide[r][u] = each[groups.of(first + u) - base];
      }
    }
    for (int64_t u = 0; u < count; u += kLanes) {
      Ints words[kLanes];
      V::transposed(rows, 4 * u, words);
      for (int w = 0; w < kLanes; w++) V::store(reinterpret_cast<uint8_t*>(to + (u + w) * kLanes), words[w]);
    }
  }

  // Adds what a span gives to the sums of C columns. Spans are of an even number of units, but for the last.
  template <int C, bool kOffset>
  static void multiply(const Strip& strip, int64_t count, const uint8_t* x, const uint8_t* ahead,
                       float (*sums)[2][kLanes]) {
    Vector own[2][C];
    for (int c = 0; c < C; c++)
      for (int p = 0; p < 2; p++) own[p][c] = V::load(sums[c][p]);
    auto unit = [&](int64_t u, Vector* to) {
      Vector dots[C], scale = V::load(strip.scale + u * kLanes);
      auto numbers = reinterpret_cast<const float*>(x + kUnit * C);
      V::template dots<C, kBits>(strip.codes + u * kLanes * kUnit, x, x + (kUnit + 4) * C, dots);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) to[c] = V::fma(dots[c], V::mul(scale, V::all(numbers[c])), to[c]);
      if (kOffset) {
        Vector offset = V::load(strip.offset + u * kLanes);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) to[c] = V::fma(offset, V::all(numbers[2 * C + c]), to[c]);
      }
      x += kUnitBytes * C;
      for (int line = 0; ahead != nullptr && line < kLanes * kUnitCodes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
      ahead += ahead != nullptr ? kLanes * kUnitCodes : 0;
    };
    int64_t u = 0;
    for (; u + 2 <= count; u += 2) unit(u, own[0]), unit(u + 1, own[1]);
    if (u < count) unit(u, own[0]);
    for (int c = 0; c < C; c++)
      for (int p = 0; p < 2; p++) V::store(sums[c][p], own[p][c]);
  }

  template <bool kOffset>
  static void span(const Call& call, Strip& strip, int64_t first, int64_t count, const uint8_t* packed) {
    // The codes of the next rows are fetched meanwhile.
    const uint8_t* next = strip.rows[0] + kLanes * (call.row_bytes() + first * kUnitCodes);
    tiles(call, [&](int tile, int64_t column) {
      const uint8_t* x = packed + (column * units(call) + first * tile) * kUnitBytes;
      const uint8_t* ahead = column == 0 && call.columns > kFew ? next : nullptr;
      switch (tile) {
        case 1: return multiply<1, kOffset>(strip, count, x, ahead, strip.sums + column);
        case 2: return multiply<2, kOffset>(strip, count, x, ahead, strip.sums + column);
        case 4: return multiply<4, kOffset>(strip, count, x, ahead, strip.sums + column);
        default: return multiply<V::kTile, kOffset>(strip, count, x, ahead, strip.sums + column);
      }
    });
  }

  static void rows(const Call& call, const uint8_t* packed, int64_t begin, int64_t end) {
    Strip strip;
    int64_t row_bytes = call.row_bytes(), scale_bytes = call.scale_bytes(), all = units(call);
    for (; begin < end; begin += kLanes) {
      int64_t count = end - begin < kLanes ? end - begin : kLanes;
      for (int r = 0; r < kLanes; r++) {
        int64_t row = begin + (r < count ? r : count - 1);
        strip.rows[r] = call.weights + row * row_bytes;
        strip.scales[r] = static_cast<const uint8_t*>(call.scale) + row * scale_bytes;
        if (call.offset != nullptr) strip.offsets[r] = static_cast<const uint8_t*>(call.offset) + row * scale_bytes;
      }
      std::memset(strip.sums, 0, sizeof(strip.sums[0]) * call.columns);
      for (int64_t first = 0; first < all; first += kSpan) {
        int64_t own = all - first < kSpan ? all - first : kSpan;
        unpack(call, strip, first, own);
        spread(call, strip.scales, first, own, strip.scale);
        if (call.offset == nullptr) {
          span<false>(call, strip, first, own, packed);
        } else {
          spread(call, strip.offsets, first, own, strip.offset);
          span<true>(call, strip, first, own, packed);
        }
      }
      for (int64_t c = 0; c < call.columns; c++)
        for (int64_t r = 0; r < count; r++)
          call.out[(begin + r) * call.columns + c] = strip.sums[c][0][r] + strip.sums[c][1][r];
    }
  }

  static constexpr Form form() { return {packed_bytes, pack, rows}; }
};

template <class V>
const Form* int8_form(const Call& call) {
  static constexpr Form of_bytes = Int8Columns<V, 8>::form(), of_halves = Int8Columns<V, 4>::form();
  return call.format == kInt8 ? &of_bytes : &of_halves;
}

}  // namespace
}  // namespace specjax
