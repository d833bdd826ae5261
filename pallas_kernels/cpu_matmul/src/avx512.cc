// x86-64 with AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#include "avx512_vectors.h"

const specjax::Form* specjax::avx512_form(const Call& call) { return float_form<Avx512>(call.format); }
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "matmul.h"
const specjax::Form* specjax::avx512_form(const Call&) { return nullptr; }
#endif
