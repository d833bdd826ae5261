// Every form that this processor has, over sizes that do not divide, on several threads: for the sanitizers.
// Buffers end where what is in them ends. Exits with 1 and a line at the first wrong number.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "dispatch.h"

namespace {

using namespace specjax;

uint32_t state = 1;
uint32_t number() { return state = state * 1664525u + 1013904223u; }
float real() { return static_cast<float>(static_cast<int32_t>(number()) >> 8) / 8388608.0f; }
float of_bits(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
uint16_t upper(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// A pool that outlives products, as XLA's does: threads that have helped wait for the next one.
struct Pool {
  std::mutex mutex;
  std::condition_variable woken;
  std::vector<std::function<void()>> tasks;
  std::vector<std::thread> threads;
  bool ends = false;

  explicit Pool(int count) {
    for (int i = 0; i < count; i++) threads.emplace_back([this] { run(); });
  }
  void schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      tasks.push_back(std::move(task));
    }
    woken.notify_one();
  }
  void run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      woken.wait(lock, [this] { return ends || !tasks.empty(); });
      if (tasks.empty()) return;
      auto task = std::move(tasks.back());
      tasks.pop_back();
      lock.unlock();
      task();
    }
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      ends = true;
    }
    woken.notify_all();
    for (auto& thread : threads) thread.join();
  }
};

// What numbers become in 8 bits, each 32 inputs of a column with a scale.
std::vector<float> in_8_bits(std::vector<float> x, int64_t inputs, int64_t columns) {
  for (int64_t c = 0; c < columns; c++)
    for (int64_t first = 0; first < inputs; first += kUnit) {
      int64_t last = std::min(inputs, first + kUnit);
      float most = 0;
      for (int64_t i = first; i < last; i++) most = std::fmax(most, std::fabs(x[i * columns + c]));
      float inverse = most > 0 ? 127 / most : 0;
      for (int64_t i = first; i < last; i++) x[i * columns + c] = std::rint(x[i * columns + c] * inverse) * (most / 127);
    }
  return x;
}

// How columns are multiplied.
enum Columns : int { kWhole, kRounded, kQuantized };

bool agree(const char* form, Format format, Columns how, int64_t outputs, int64_t inputs, int64_t columns,
           int64_t groups, bool has_offset, int64_t threads, Pool& pool) {
  Call call{};
  bool rounded = how == kRounded;
  call.format = format, call.rounded = rounded, call.quantized = how == kQuantized;
  call.outputs = outputs, call.inputs = inputs, call.columns = columns, call.groups = groups;
  call.scale_type = kScaleBfloat16;
  std::vector<uint8_t> weights(outputs * call.row_bytes());
  std::vector<uint16_t> scale(outputs * groups), offset(has_offset ? outputs * groups : 0);
  std::vector<float> x(inputs * columns), out(outputs * columns, NAN);
  for (auto& each : x) each = real();
  for (auto& each : scale) each = upper(0.01f + 0.01f * std::fabs(real()));
  for (auto& each : offset) each = upper(real());
  std::vector<double> numbers(outputs * inputs);
  for (int64_t o = 0; o < outputs; o++) {
    for (int64_t i = 0; i < inputs; i++) {
      int64_t at = o * inputs + i;
      double& stands_for = numbers[at];
      if (format == kFloat32) {
        float value = real();
        std::memcpy(&weights[4 * at], &value, 4);
        stands_for = value;
      } else if (format == kBfloat16) {
        uint16_t bits = upper(real());
        std::memcpy(&weights[2 * at], &bits, 2);
        stands_for = of_bits(bits);
      } else {
        int code = number() >> (format == kInt8 ? 24 : 28);
        if (format == kInt8) weights[at] = static_cast<uint8_t>(code);
        else weights[at / 2] = static_cast<uint8_t>(weights[at / 2] | code << (i % 2 ? 4 : 0));
        int64_t group = o * groups + i / (inputs / groups);
        int middle = has_offset ? 0 : format == kInt8 ? 128 : 8;
        float value = (code - middle) * of_bits(scale[group]) + (has_offset ? of_bits(offset[group]) : 0.0f);
        bool sums = format == kInt8 && groups == 1 && !has_offset;
        stands_for = rounded && !sums ? of_bits(upper(value)) : value;
      }
    }
  }
  call.weights = weights.data(), call.scale = scale.data(), call.x = x.data(), call.out = out.data();
  call.offset = has_offset ? offset.data() : nullptr;
  Call first = call, second = call;  // as two matrices
  first.outputs = outputs / 3, second.outputs = outputs - first.outputs;
  second.weights += first.outputs * call.row_bytes(), second.out += first.outputs * columns;
  second.scale = scale.data() + first.outputs * groups;
  if (has_offset) second.offset = offset.data() + first.outputs * groups;
  if (!multiply({first, second}, threads, [&](auto task) { pool.schedule(task); })) return false;
  if (call.quantized) x = in_8_bits(x, inputs, columns);
  double most = 0, off = 0;
  for (int64_t o = 0; o < outputs; o++) {
    for (int64_t c = 0; c < columns; c++) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < inputs; i++) {
        float value = x[i * columns + c];
        double product = numbers[o * inputs + i] * (rounded ? of_bits(upper(value)) : value);
        sum += product, size += std::fabs(product);
      }
      most = std::fmax(most, size);
      double error = std::fabs(sum - out[o * columns + c]);
      off = error > off || std::isnan(error) ? error : off;
    }
  }
  double allowed = 1e-6 * (most > 0 ? most : 1);
  if (off <= allowed) return true;
  std::printf("%s: format %d columns %d, %ld x %ld times %ld, %ld groups, offsets %d, %ld threads: off by %g of %g\n",
              form, static_cast<int>(format), how, static_cast<long>(outputs), static_cast<long>(inputs),
              static_cast<long>(columns), static_cast<long>(groups), has_offset, static_cast<long>(threads), off, most);
  return false;
}

bool attends(const char* form, int64_t nodes, int64_t columns, int64_t slots, int64_t dim, bool first, int64_t threads,
             Pool& pool) {
  Attention call{};
  call.rows = 2, call.heads = 6, call.kv_heads = 2, call.nodes = nodes, call.columns = columns;
  bool paged = slots > kPage && slots % kPage == 0;  // in reverse
  call.page = paged ? kPage : slots, call.row_pages = paged ? slots / kPage : 1, call.held = 2 * call.row_pages;
  call.dim = dim, call.scale = 1 / std::sqrt(static_cast<float>(dim));
  std::vector<int32_t> pages;
  for (int64_t n = call.held - 1; paged && n >= 0; n--) pages.push_back(static_cast<int32_t>(n));
  if (paged) call.pages = pages.data();
  auto drawn = [](int64_t count) {
    std::vector<float> made(count);
    for (auto& each : made) each = real();
    return made;
  };
  auto query = drawn(12 * dim * nodes), block_keys = drawn(4 * columns * dim), block_values = drawn(4 * columns * dim);
  auto keys = drawn(4 * dim * slots), values = drawn(4 * dim * slots);
  std::vector<float> out(query.size(), NAN);
  std::vector<uint8_t> seen(2 * nodes * columns);
  std::vector<int32_t> length = {static_cast<int32_t>(slots), static_cast<int32_t>(slots / 2)}, from(2 * nodes);
  for (auto& each : seen) each = number() >> 31;
  for (int64_t t = 0; t < 2 * nodes; t++) seen[t * columns + columns - 1] = 1;
  for (auto& each : from) each = static_cast<int32_t>(number() % (slots + 2)) - 1;
  call.query = query.data(), call.block_keys = block_keys.data(), call.block_values = block_values.data();
  call.tree_mask = seen.data(), call.out = out.data();
  if (slots > 0) call.keys = keys.data(), call.values = values.data(), call.length = length.data();
  if (first && slots > 0) call.first = from.data();
  if (!attend(call, threads, [&](auto task) { pool.schedule(task); })) return false;
  double off = 0;
  for (int64_t b = 0; b < 2; b++)
    for (int64_t h = 0; h < 6; h++)
      for (int64_t t = 0; t < nodes; t++) {
        int64_t head = b * 2 + h / 3, live = slots > 0 ? length[b] : 0;
        auto at = [&](int64_t d) { return ((h * dim + d) * 2 + b) * nodes + t; };
        std::vector<double> mixed(dim, 0.0);
        double total = 0;
        auto add = [&](auto key, auto value) {
          double score = 0;
          for (int64_t d = 0; d < dim; d++) score += static_cast<double>(query[at(d)]) * key(d);
          double weight = std::exp(score * call.scale);
          total += weight;
          for (int64_t d = 0; d < dim; d++) mixed[d] += weight * value(d);
        };
        for (int64_t s = 0; s < live; s++) {
          if (call.first != nullptr && s < from[b * nodes + t]) continue;
          int64_t number = b * call.row_pages + s / call.page, in_page = s % call.page;
          int64_t own = (paged ? pages[number] : number) * 2 + h / 3;
          add([&](int64_t d) { return keys[(own * dim + d) * call.page + in_page]; },
              [&](int64_t d) { return values[(own * call.page + in_page) * dim + d]; });
        }
        for (int64_t m = 0; m < columns; m++)
          if (seen[(b * nodes + t) * columns + m])
            add([&](int64_t d) { return block_keys[(head * columns + m) * dim + d]; },
                [&](int64_t d) { return block_values[(head * columns + m) * dim + d]; });
        for (int64_t d = 0; d < dim; d++) {
          double error = std::fabs(mixed[d] / total - out[at(d)]);
          off = error > off || std::isnan(error) ? error : off;
        }
      }
  if (off <= 1e-5) return true;
  std::printf("%s: attention of %ld nodes, %ld columns, %ld slots, %ld features off by %g\n", form,
              static_cast<long>(nodes), static_cast<long>(columns), static_cast<long>(slots), static_cast<long>(dim), off);
  return false;
}

// Two callers at once, each of which hands products to whoever waits.
bool busy(const char* form, Pool& pool) {
  std::atomic<bool> right{true};
  auto caller = [&](int seed) {
    Call call{};
    call.format = kFloat32, call.outputs = 300, call.inputs = 256, call.columns = 1 + seed;
    std::vector<float> weights(call.outputs * call.inputs, 0.5f), x(call.inputs * call.columns, 1.0f);
    std::vector<float> out(call.outputs * call.columns);
    call.weights = reinterpret_cast<const uint8_t*>(weights.data()), call.x = x.data(), call.out = out.data();
    for (int i = 0; i < 300; i++) {
      std::fill(out.begin(), out.end(), 0.0f);
      if (!multiply({call}, 3, [&](auto task) { pool.schedule(task); })) right = false;
      for (float each : out)
        if (each != 128.0f) right = false;
      if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // as long as nobody waits
    }
  };
  std::thread other(caller, 0);
  caller(7);
  other.join();
  if (!right) std::printf("%s: wrong when two products run at once\n", form);
  return right;
}

}  // namespace

int main() {
  int forms = 0;
  Pool pool(3);
  for (const char* form : {"portable", "neon", "neon_dotprod", "avx2", "avx512", "avx512_vnni", "avx512_bf16"}) {
    if (!select(form)) continue;
    forms++;
    for (int format = 0; format < kFormats; format++) {
      for (Columns how : {kWhole, kRounded, kQuantized}) {
        if (how == kQuantized && format < kInt8) continue;
        for (int64_t inputs : {2, 30, 64, 96, 130, 192}) {
          for (int64_t outputs : {1, 5, 24, 61}) {
            for (int64_t columns : {1, 2, 3, 4, 5, 8, 9, 17, 64}) {
              std::vector<int64_t> groups = {1};
              bool coded = format >= kInt8;
              if (coded && inputs % 32 == 0) groups.push_back(inputs / 32);
              if (coded && inputs % 64 == 0) groups.push_back(inputs / 64);
              for (int64_t count : groups)
                for (bool has_offset : {false, true})
                  if ((coded || !has_offset) && !agree(form, static_cast<Format>(format), how, outputs, inputs,
                                                       columns, count, has_offset, 1, pool))
                    return 1;
            }
          }
        }
        for (int64_t columns : {3, 16})
          if (!agree(form, static_cast<Format>(format), how, 1030, 512, columns, 1, false, 4, pool)) return 1;
        for (int64_t columns : {1, 16})  // more groups than a span has
          if (!agree(form, static_cast<Format>(format), how, 9, 4192, columns, format >= kInt8 ? 131 : 1, false, 1, pool))
            return 1;
      }
    }
    for (int64_t slots : {0, 1, 16, 37, 64, 150, 192})
      for (int64_t dim : {16, 48, 64})
        for (int64_t nodes : {1, 2, 7, 30})
          for (bool first : {false, true})
            if (!attends(form, nodes, nodes + 3, slots, dim, first, 1 + nodes % 2 * 3, pool)) return 1;
    if (!attends(form, 40, 40, 700, 64, true, 4, pool)) return 1;
    for (bool first : {false, true})
      for (int64_t slots : {0, 100, 128})
        if (!attends(form, 67, 70, slots, 48, first, 4, pool)) return 1;
    if (!busy(form, pool)) return 1;
  }
  std::printf("%d forms agree\n", forms);
  return 0;
}
