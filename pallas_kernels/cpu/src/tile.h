// The loops that all forms share. Included by one file a processor family, which defines how blocks of
// weights are read and multiplied; everything is local to that file, so that no other runs its instructions.
//
// An arithmetic `M` says, for blocks of inputs:
//   kBlock inputs of a block; kBytes of its weights in a row; kReadyBytes of them as they are multiplied;
//   kXBytes of a packed column, kPacksBfloat16 if `pack` rounds it; kRows of a tile of kColumns columns
//   kRowsOfOne that are multiplied together with one column, and half as many with two or three
//   kMostAsCodes: columns up to which codes are read anew for each tile; for more they are unpacked once
//   Scales, what is known of a row; Weights load(bytes, scales, group), Weights ready(bytes), store(weights, bytes)
//   pack(floats, bytes), X load_x(bytes), clear(sum), dot(sum, weights, x), totals(four sums, their scales, floats)
//
// Which sums a product is made of does not depend on the number of columns or threads: nor does any bit of it.
#ifndef SPECJAX_CPU_MATMUL_TILE_H_
#define SPECJAX_CPU_MATMUL_TILE_H_

#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "matmul.h"

namespace specjax {
namespace {

constexpr int kColumns = 4;  // of a tile

inline float widened(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// To the nearest bfloat16, ties to even, as bits.
inline uint16_t rounded_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of float16. Nothing on the way is a denormal float32, which a thread may take for 0.
inline float of_half(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = static_cast<uint32_t>(half & 0x7fff) << 13;
  uint32_t exponent = rest & 0x0f800000u, is_small = -static_cast<uint32_t>(exponent == 0);
  uint32_t is_none = -static_cast<uint32_t>(exponent == 0x0f800000u), bits = rest + (112u << 23) + (is_none & 112u << 23);
  uint32_t small = rest + (113u << 23), least = 113u << 23;
  float of_small, less;
  std::memcpy(&of_small, &small, 4);
  std::memcpy(&less, &least, 4);
  of_small -= less;
  std::memcpy(&small, &of_small, 4);
  bits = (small & is_small) | (bits & ~is_small) | sign;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Calls each(i) for all i below `count`, 16 at a time, which compilers make vectors of; the last ones with some before.
template <class Each>
inline void all_below(int64_t count, Each each) {
  if (count < 16) {
    for (int64_t i = 0; i < count; i++) each(i);
    return;
  }
  for (int64_t from = 0; from < count; from += 16) {
    int64_t at = from + 16 <= count ? from : count - 16;
    for (int64_t i = at; i < at + 16; i++) each(i);
  }
}

inline void widen_halves(const uint16_t* from, int64_t count, float* __restrict to) {
#ifdef SPECJAX_F16C
  if (count >= 8) {
    for (int64_t next = 0; next < count; next += 8) {
      int64_t at = next + 8 <= count ? next : count - 8;
      _mm256_storeu_ps(to + at, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at))));
    }
    return;
  }
#endif
  all_below(count, [=](int64_t i) { to[i] = of_half(from[i]); });
}

// `count` scales or offsets from the first on, as float32.
inline void widen(ScaleType type, const void* from, int64_t first, int64_t count, float* __restrict to) {
  auto halves = static_cast<const uint16_t*>(from) + first;
  switch (type) {
    case kScaleFloat16: return widen_halves(halves, count, to);
    case kScaleBfloat16: return all_below(count, [=](int64_t i) { to[i] = widened(halves[i]); });
    default: std::memcpy(to, static_cast<const float*>(from) + first, 4 * count);
  }
}

constexpr int64_t kSpan = 64;  // units of inputs whose scales are widened at a time: no more groups than that

// Which group a unit of inputs is in. A division takes as long as 16 products on some processors.
struct Groups {
  uint64_t factor;  // 2 to the 40th over the units of a group; 0 where that is all of a row
  explicit Groups(const Call& call, int64_t unit = kUnit)
      : factor(call.groups <= 1 ? 0 : (uint64_t{1} << 40) / (call.inputs / call.groups / unit) + 1) {}
  int64_t of(int64_t unit) const { return static_cast<int64_t>((static_cast<uint64_t>(unit) * factor) >> 40); }
};

// The groups of a block's first unit and of its second, counted from the first group of the span.
struct OfBlock {
  int64_t first, second;
};

// Of a row of weights that has none.
struct NoScale {
  static constexpr bool kGrouped = false;
  static constexpr int64_t kInputs = kUnit;
  void read(const Call&, int64_t) {}
  void widen_span(int64_t, int64_t) {}
  float of_sums() const { return 1; }
};

// One scale a row, by which its sums are multiplied.
struct RowScale {
  static constexpr bool kGrouped = false;
  static constexpr int64_t kInputs = kUnit;
  float of_row;
  void read(const Call& call, int64_t row) { widen(call.scale_type, call.scale, row, 1, &of_row); }
  void widen_span(int64_t, int64_t) {}
  float of_sums() const { return of_row; }
};

// What a row's codes are multiplied by, and what is added to that, in the groups of a span.
struct GroupScales {
  static constexpr bool kGrouped = true;
  static constexpr int64_t kInputs = kUnit;  // of a unit
  ScaleType type;
  float middle;
  int64_t row_bytes;
  const void *scales, *offsets;
  float scale[kSpan + 1], bias[kSpan + 1];  // one more: that of a unit behind the last
  void read(const Call& call, int64_t row) {
    type = call.scale_type, row_bytes = call.scale_bytes(), middle = call.format == kInt8 ? 128.0f : 8.0f;
    scales = static_cast<const uint8_t*>(call.scale) + row * call.scale_bytes();
    offsets = call.offset == nullptr ? nullptr : static_cast<const uint8_t*>(call.offset) + row * call.scale_bytes();
  }
  // Apart from the loops, whose sums are in registers.
  __attribute__((noinline)) void widen_span(int64_t first, int64_t count) {
    fetch(scales, first, count);
    widen(type, scales, first, count, scale);
    if (offsets != nullptr) {
      fetch(offsets, first, count);
      widen(type, offsets, first, count, bias);
    } else {
      all_below(count, [this](int64_t g) { bias[g] = -middle * scale[g]; });
    }
    scale[count] = bias[count] = 0;
  }
  // Those of the next row, which is most often the next that is asked for.
  void fetch(const void* of_row, int64_t first, int64_t count) const {
    int64_t size = type == kScaleFloat32 ? 4 : 2;
    auto next = static_cast<const uint8_t*>(of_row) + row_bytes + first * size;
    for (int64_t at = 0; at < count * size; at += 64) __builtin_prefetch(next + at, 0, 2);
  }
  float of_sums() const { return 1; }
};

// The same of groups that are halves of units.
struct HalfScales : GroupScales {
  static constexpr int64_t kInputs = kHalf;
};

// The same of codes that have a table.
struct TableScales : GroupScales {
  const float* table;
  void read(const Call& call, int64_t row) {
    GroupScales::read(call, row);
    table = call.table;
  }
};

// A block of inputs of all columns, turned: `turned[c * kBlock + i]`, zeros past the last input.
template <int kBlock>
inline void turn(const Call& call, int64_t block, float* turned, bool rounded) {
  int64_t begin = block * kBlock, count = call.inputs - begin, columns = call.columns;
  if (count > kBlock) count = kBlock;
  const float* x = call.x + begin * columns;
  if (columns == 1) {
    std::memcpy(turned, x, count * 4);
  } else {
    for (int64_t i = 0; i < count; i++)
      for (int64_t c = 0; c < columns; c++) turned[c * kBlock + i] = x[i * columns + c];
  }
  for (int64_t c = 0; c < columns && count < kBlock; c++)
    std::memset(turned + c * kBlock + count, 0, (kBlock - count) * 4);
  if (rounded)
    for (int64_t i = 0; i < columns * kBlock; i++) turned[i] = widened(rounded_bits(turned[i]));
}

template <class M>
struct Driver {
  static constexpr bool kCoded = M::kReadyBytes != M::kBytes, kGrouped = M::Scales::kGrouped;
  static constexpr int64_t kInputs = M::Scales::kInputs;
  static constexpr int64_t kSpanBlocks = kGrouped ? kSpan * kInputs / M::kBlock : int64_t{1} << 40;

  // Goes over some rows in spans of kSpanBlocks, whose scales are widened; says in which groups a block is.
  template <int R>
  struct Walk {
    Groups groups;
    typename M::Scales* scales;
    int64_t units, base = 0;
    Walk(const Call& call, typename M::Scales* scales)
        : groups(call, kInputs), scales(scales), units(ceil_div(call.inputs, kInputs)) {}
    void enter(int64_t block) {
      if (!kGrouped) return;
      int64_t unit = block * M::kBlock / kInputs, last = unit + kSpan < units ? unit + kSpan - 1 : units - 1;
      base = groups.of(unit);
      for (int r = 0; r < R; r++) scales[r].widen_span(base, groups.of(last) - base + 1);
    }
    OfBlock at(int64_t block) const {
      if (!kGrouped) return {0, 0};
      int64_t unit = block * M::kBlock / kInputs;
      return {groups.of(unit) - base, groups.of(unit + 1) - base};
    }
  };

  template <int R>
  static constexpr int kBlocksOfALine = R * M::kBytes < 64 ? 64 / (R * M::kBytes) : 1;

  static int64_t blocks(const Call& call) { return ceil_div(call.inputs, M::kBlock); }

  static size_t packed_bytes(const Call& call) { return blocks(call) * M::kXBytes * call.columns; }

  static void pack(const Call& call, uint8_t* packed) {
    alignas(kAlign) float turned[kMostColumns * M::kBlock];
    int64_t stride = blocks(call) * M::kXBytes;
    for (int64_t b = 0; b < blocks(call); b++) {
      turn<M::kBlock>(call, b, turned, call.rounded && !M::kPacksBfloat16);
      for (int64_t c = 0; c < call.columns; c++)
        M::pack(turned + c * M::kBlock, packed + c * stride + b * M::kXBytes);
    }
  }

  // Rows of weights that are multiplied together.
  template <int R>
  struct Strip {
    int64_t begin, count;
    mutable typename M::Scales scales[R];
    float of_sums[R][kColumns];  // what a row's sums are multiplied by
    const uint8_t* rows[R];
    const uint8_t* ready[R];  // the same as they are multiplied, where they were codes
    alignas(kAlign) uint8_t tail[R][M::kBytes];  // what is left behind the last whole block, and zeros
    const uint8_t* ahead;  // lines that are fetched meanwhile, so many a block
    int lines;
  };

  template <int R, int C, bool kReady>
  static void tile(const Call& call, const Strip<R>& strip, const uint8_t* x, int64_t column, const uint8_t* ahead) {
    typename M::Sum sums[R][kColumns];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; c++) M::clear(sums[r][c]);
    int64_t whole = call.inputs / M::kBlock, all = blocks(call), stride = all * M::kXBytes;
    Walk<R> walk(call, strip.scales);
    auto block = [&](int64_t b, auto whole_rows) {
      OfBlock group = kReady ? OfBlock{} : walk.at(b);
      if (b % kBlocksOfALine<R> == 0)
        for (int line = 0; line < strip.lines; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      typename M::Weights weights[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        if (kReady) {
          weights[r] = M::ready(strip.ready[r] + b * M::kReadyBytes);
        } else {
          weights[r] = M::load(whole_rows ? strip.rows[r] + b * M::kBytes : strip.tail[r], strip.scales[r], group);
        }
      }
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        typename M::X columns = M::load_x(x + c * stride + b * M::kXBytes);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) M::dot(sums[r][c], weights[r], columns);
      }
    };
    // The tail apart: beside the whole blocks its weights would be kept in registers, and the sums would not.
    int64_t direct = kReady ? all : whole;
    for (int64_t b = 0; b < direct;) {
      if (!kReady) walk.enter(b);
      int64_t end = kReady || direct - b < kSpanBlocks ? direct : b + kSpanBlocks;
      for (; b < end; b++) block(b, std::true_type());
    }
    if (direct < all) {
      if (direct % kSpanBlocks == 0) walk.enter(direct);
      block(direct, std::false_type());
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      if (r >= strip.count) break;
      float totals[kColumns];
      M::totals(sums[r], strip.of_sums[r], totals);
      std::memcpy(call.out + (strip.begin + r) * call.columns + column, totals, 4 * C);
    }
  }

  template <int R, bool kReady>
  static void tiles(const Call& call, const Strip<R>& strip, const uint8_t* packed) {
    int64_t stride = blocks(call) * M::kXBytes;
    for (int64_t c = 0; c < call.columns; c += kColumns) {
      const uint8_t* x = packed + c * stride;
      const uint8_t* ahead = strip.ahead + c / kColumns * blocks(call) * strip.lines * 64;
      switch (call.columns - c) {
        case 1: tile<R, 1, kReady>(call, strip, x, c, ahead); break;
        case 2: tile<R, 2, kReady>(call, strip, x, c, ahead); break;
        case 3: tile<R, 3, kReady>(call, strip, x, c, ahead); break;
        default: tile<R, 4, kReady>(call, strip, x, c, ahead);
      }
    }
  }

  // Rows times all columns. Rows past the end are the last one again, and are not written.
  template <int R>
  static void strips(const Call& call, const uint8_t* packed, int64_t begin, int64_t end, uint8_t* scratch) {
    int64_t row_bytes = call.row_bytes(), whole = call.inputs / M::kBlock, all = blocks(call);
    int64_t left = row_bytes - whole * M::kBytes;
    Strip<R> strip;
    for (; begin < end; begin += R) {
      strip.begin = begin;
      strip.count = end - begin < R ? end - begin : R;
      for (int r = 0; r < R; r++) {
        int64_t row = begin + (r < strip.count ? r : strip.count - 1);
        strip.rows[r] = call.weights + row * row_bytes;
        if (left > 0) {
          std::memcpy(strip.tail[r], strip.rows[r] + whole * M::kBytes, left);
          std::memset(strip.tail[r] + left, 0, M::kBytes - left);
        }
        strip.scales[r].read(call, row);
        for (float& each : strip.of_sums[r]) each = strip.scales[r].of_sums();
      }
      // The weights of the next rows are fetched meanwhile.
      int64_t tiles_of_it = ceil_div(call.columns, kColumns);
      bool fetch = begin + 2 * R <= end;
      strip.lines = fetch ? static_cast<int>(ceil_div(ceil_div(R * M::kBytes, 64), tiles_of_it)) : 0;
      strip.ahead = call.weights + (begin + R) * row_bytes;
      if (kCoded && scratch != nullptr) {
        for (int r = 0; r < R; r++) {
          uint8_t* ready = scratch + r * all * M::kReadyBytes;
          Walk<1> walk(call, strip.scales + r);
          auto block = [&](int64_t b, const uint8_t* codes) {
            M::store(M::load(codes, strip.scales[r], walk.at(b)), ready + b * M::kReadyBytes);
          };
          for (int64_t b = 0; b < whole;) {
            walk.enter(b);
            int64_t end = whole - b < kSpanBlocks ? whole : b + kSpanBlocks;
            for (; b < end; b++) block(b, strip.rows[r] + b * M::kBytes);
          }
          if (left > 0) {
            if (whole % kSpanBlocks == 0) walk.enter(whole);
            block(whole, strip.tail[r]);
          }
          strip.ready[r] = ready;
        }
        tiles<R, kCoded>(call, strip, packed);
      } else {
        tiles<R, false>(call, strip, packed);
      }
    }
  }

  // Rows times fewer than kColumns columns, which leave little time to wait for weights. Each of the rows that are
  // multiplied together is from another part of them, and is followed by its neighbour: a processor reads ahead within
  // a page that is read in order, and within several pages at once.
  template <int C>
  static void few(const Call& call, const uint8_t* packed, int64_t begin, int64_t end) {
    constexpr int R = C == 1 ? M::kRowsOfOne : M::kRowsOfOne / 2, kSums = (R * C + 3) / 4 * 4, kLine = kBlocksOfALine<1>;
    int64_t row_bytes = call.row_bytes(), whole = call.inputs / M::kBlock, stride = blocks(call) * M::kXBytes;
    int64_t left = row_bytes - whole * M::kBytes, part = ceil_div(end - begin, R);
    for (int64_t i = 0; i < part; i++) {
      typename M::Sum sums[kSums];
      typename M::Scales scales[R];
      float of_sums[kSums] = {};
      const uint8_t *rows[R], *x = packed;
#pragma GCC unroll 32
      for (int s = 0; s < kSums; s++) M::clear(sums[s]);
      for (int r = 0; r < R; r++) {  // behind the end the last row again, which is not written
        int64_t row = begin + r * part + i < end ? begin + r * part + i : end - 1;
        rows[r] = call.weights + row * row_bytes;
        scales[r].read(call, row);
        for (int c = 0; c < C; c++) of_sums[r * C + c] = scales[r].of_sums();
      }
      Walk<R> walk(call, scales);
      auto block = [&](int64_t b) {
        OfBlock group = walk.at(b);
        typename M::Weights weights[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          weights[r] = M::load(rows[r], scales[r], group);
          rows[r] += M::kBytes;
        }
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          typename M::X column = M::load_x(x + c * stride);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) M::dot(sums[r * C + c], weights[r], column);
        }
        x += M::kXBytes;
      };
      int64_t ahead = begin + (R - 1) * part + i + 1 < call.outputs ? row_bytes : 0, b = 0;
      while (b < whole) {
        walk.enter(b);
        int64_t end = whole - b < kSpanBlocks ? whole : b + kSpanBlocks;
        for (; b + kLine <= end; b += kLine) {
#pragma GCC unroll 8
          for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int line = 0; line < M::kBytes * kLine; line += 64) __builtin_prefetch(rows[r] + (ahead + line), 0, 2);
#pragma GCC unroll 4
          for (int line = 0; line < kLine; line++) block(b + line);
        }
        for (; b < end; b++) block(b);
      }
      if (left > 0) {
        if (whole % kSpanBlocks == 0) walk.enter(whole);
        uint8_t tail[R][M::kBytes] = {};
        for (int r = 0; r < R; r++) rows[r] = static_cast<uint8_t*>(std::memcpy(tail[r], rows[r], left));
        block(whole);
      }
      float totals[kSums];
#pragma GCC unroll 8
      for (int s = 0; s < kSums; s += 4) M::totals(sums + s, of_sums + s, totals + s);
      for (int r = 0; r < R && begin + r * part + i < end; r++)
        std::memcpy(call.out + (begin + r * part + i) * C, totals + r * C, 4 * C);
    }
  }

  static void rows(const Call& call, const uint8_t* packed, int64_t begin, int64_t end) {
    if (call.columns == 1) {
      few<1>(call, packed, begin, end);
    } else if (call.columns == 2) {
      few<2>(call, packed, begin, end);
    } else if (call.columns == 3) {
      few<3>(call, packed, begin, end);
    } else if (!kCoded || call.columns <= M::kMostAsCodes) {
      strips<M::kRows>(call, packed, begin, end, nullptr);
    } else {
      size_t bytes = M::kRows * blocks(call) * M::kReadyBytes;
      auto scratch = static_cast<uint8_t*>(std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign));
      strips<M::kRows>(call, packed, begin, end, scratch);  // slower without, and right
      std::free(scratch);
    }
  }

  static constexpr Form form() { return {packed_bytes, pack, rows}; }
};

}  // namespace
}  // namespace specjax

#endif  // SPECJAX_CPU_MATMUL_TILE_H_
