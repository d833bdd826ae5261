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

const Form* avx512_form(const Call& call) { return float_form<Avx512>(call); }
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
