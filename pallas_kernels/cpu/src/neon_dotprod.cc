// 64-bit Arm with sums of products of four bytes (Armv8.2's dot products).
#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include "neon_bytes.h"

namespace specjax {
namespace {

struct Dotprod : NeonBytes {
  static int32x4_t dot(int32x4_t sum, int8x16_t a, int8x16_t b) { return vdotq_s32(sum, a, b); }
};

}  // namespace

const Form* neon_dotprod_form(const Call& call) {
  return call.quantized ? int8_form<NeonDots<Dotprod>>(call) : neon_form(call);
}

}  // namespace specjax
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "matmul.h"
const specjax::Form* specjax::neon_dotprod_form(const Call&) { return nullptr; }
#endif
