#include "dispatch.h"

#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace specjax {

Waiting waiting;

namespace {

using Find = const Form* (*)(const Call&);

struct Kind {
  const char* name;
  Find find;
  AttentionForm attention;
  bool (*there)();
};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512_vnni() { return false; }
bool has_avx512_bf16() { return false; }
#endif
#if defined(__aarch64__)
bool has_neon() { return true; }
#else
bool has_neon() { return false; }
#endif
#if defined(__aarch64__) && defined(__APPLE__)
bool has_dotprod() { return true; }
#elif defined(__aarch64__) && defined(__linux__)
bool has_dotprod() { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }
#else
bool has_dotprod() { return false; }
#endif
bool always() { return true; }

const Kind kKinds[] = {  // the best first
    {"avx512_bf16", avx512_bf16_form, avx512_attention, has_avx512_bf16},
    {"avx512_vnni", avx512_vnni_form, avx512_attention, has_avx512_vnni},
    {"avx512", avx512_form, avx512_attention, has_avx512},
    {"avx2", avx2_form, avx2_attention, has_avx2},
    {"neon_dotprod", neon_dotprod_form, neon_attention, has_dotprod},
    {"neon", neon_form, neon_attention, has_neon},
    {"portable", portable_form, portable_attention, always},
};

const Kind* best() {
  for (const Kind& kind : kKinds)
    if (kind.there()) return &kind;
  return nullptr;
}

std::atomic<const Kind*> chosen{nullptr};

const Kind* current() {
  const Kind* kind = chosen.load(std::memory_order_acquire);
  if (kind == nullptr) {
    kind = best();
    chosen.store(kind, std::memory_order_release);
  }
  return kind;
}

}  // namespace

const Form* form_for(const Call& call) { return current()->find(call); }

AttentionForm attention_form() { return current()->attention; }

const char* selected() { return current()->name; }

bool select(const char* name) {
  if (std::strcmp(name, "best") == 0) {
    chosen.store(best(), std::memory_order_release);
    return true;
  }
  for (const Kind& kind : kKinds) {
    if (std::strcmp(name, kind.name) == 0 && kind.there()) {
      chosen.store(&kind, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace specjax
