// Which form runs, and a product on several threads.
#ifndef SPECJAX_CPU_MATMUL_DISPATCH_H_
#define SPECJAX_CPU_MATMUL_DISPATCH_H_

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "attention.h"
#include "matmul.h"

namespace specjax {

// The form that was selected, or else the best of this processor.
const Form* form_for(const Call&);
AttentionForm attention_form();
const char* selected();
// Selects a form by name for the whole process; "best" is what is there without. False if this processor lacks it.
bool select(const char* name);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Units are claimed in chunks by whoever comes: the caller, which returns when all are done, and up to
// `helpers` others. One that comes late finds nothing left, so that nobody waits for a thread to be free.
struct Work {
  int64_t units = 0, chunk = 1;
  std::atomic<int64_t> next{0}, done{0};

  virtual ~Work() = default;
  virtual void run(int64_t begin, int64_t end) = 0;

  void take() {
    for (;;) {
      int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= units) return;
      int64_t end = begin + chunk < units ? begin + chunk : units;
      run(begin, end);
      done.fetch_add(end - begin, std::memory_order_release);
    }
  }
};

// The outputs of some matrices times the same columns, one matrix after the other.
struct Product : Work {
  std::vector<Call> calls;
  const Form* form;
  std::unique_ptr<uint8_t, void (*)(void*)> packed{nullptr, std::free};

  void run(int64_t begin, int64_t end) override {
    for (const Call& call : calls) {
      int64_t last = end < call.outputs ? end : call.outputs;
      if (begin < last) form->rows(call, packed.get(), begin > 0 ? begin : 0, last);
      begin -= call.outputs, end -= call.outputs;
      if (end <= 0) return;
    }
  }
};

// The heads of attention, some queries each.
struct Heads : Work {
  Attention call;
  AttentionForm form;
  std::atomic<bool> short_of_memory{false};

  void run(int64_t begin, int64_t end) override {
    if (!form(call, begin, end)) short_of_memory.store(true, std::memory_order_relaxed);
  }
};

// Of a step of an 18M model, whose products are 20 to 100 microseconds apart: with 200 it takes 0.8 to 0.95 of its
// time without, with 50 about 0.95 (2 cores of a Zen 4, 2026-11-26).
constexpr std::chrono::microseconds kLinger{200};

// Where a thread that has helped waits a moment for the next product, as waking it takes longer than most
// small products do. It gives the pool its thread back after `kLinger`.
class Waiting {
 public:
  // Gives work to up to `count` waiting threads; how many there were.
  int64_t give(const std::shared_ptr<Work>& work, int64_t count) {
    int64_t given = 0;
    for (Place& place : places_) {
      if (given == count) break;
      int state = kWaits;
      if (place.state.load(std::memory_order_relaxed) != kWaits ||
          !place.state.compare_exchange_strong(state, kTaken, std::memory_order_acquire))
        continue;
      place.work = work;
      place.state.store(kGiven, std::memory_order_release);
      given++;
    }
    return given;
  }

  // Helps, then waits for more and helps again, until none comes in time.
  void help(std::shared_ptr<Work> work) {
    while (work) {
      work->take();
      work.reset();
      for (Place& place : places_) {
        int state = kEmpty;
        if (place.state.compare_exchange_strong(state, kWaits, std::memory_order_acq_rel)) {
          work = wait(place);
          break;
        }
      }
    }
  }

 private:
  enum State : int { kEmpty, kWaits, kTaken, kGiven };
  struct alignas(kAlign) Place {
    std::atomic<int> state{kEmpty};
    std::shared_ptr<Work> work;
  };

  static std::shared_ptr<Work> wait(Place& place) {
    auto end = std::chrono::steady_clock::now() + kLinger;
    for (;;) {
      for (int i = 0; i < 32; i++) {
        if (place.state.load(std::memory_order_acquire) == kGiven) {
          std::shared_ptr<Work> work = std::move(place.work);
          place.work.reset();
          place.state.store(kEmpty, std::memory_order_release);
          return work;
        }
        pause();
      }
      int state = kWaits;
      if (std::chrono::steady_clock::now() > end &&
          place.state.compare_exchange_strong(state, kEmpty, std::memory_order_acq_rel))
        return nullptr;
    }
  }

  Place places_[16];
};

extern Waiting waiting;

// Bytes of weights times a share of the columns: below kAlone one thread does all, below kAwake no other is woken for it.
constexpr int64_t kAlone = 1 << 16, kAwake = 1 << 18;
constexpr int64_t kChunkBytes = 1 << 19;

// How many others may help with work of that cost: those that wait, and those that are woken if too few do.
struct Helpers {
  int64_t most, woken;
  Helpers(int64_t cost, int64_t threads)
      : most(cost < kAlone ? 0 : threads - 1), woken(cost < kAwake ? 0 : threads - 1) {}
};

// Does all of it, with the help of others: `schedule(f)` runs f() on another thread, some time.
template <class Schedule>
void all_of(const std::shared_ptr<Work>& work, const Helpers& helpers, Schedule&& schedule) {
  int64_t chunks = (work->units + work->chunk - 1) / work->chunk;
  int64_t most = helpers.most < chunks - 1 ? helpers.most : chunks - 1;
  int64_t woken = helpers.woken < most ? helpers.woken : most;
  for (int64_t i = waiting.give(work, most); i < woken; i++) schedule([work] { waiting.help(work); });
  work->take();
  for (int spins = 0; work->done.load(std::memory_order_acquire) < work->units; spins++)
    spins > 1000 ? std::this_thread::yield() : pause();
}

// Matrices of one format times the same columns, at least one. False where memory is short.
template <class Schedule>
bool multiply(const std::vector<Call>& calls, int64_t threads, Schedule&& schedule) {
  const Call& call = calls[0];
  int64_t outputs = 0;
  for (const Call& each : calls) outputs += each.outputs;
  if (outputs == 0 || call.columns == 0) return true;
  auto work = std::make_shared<Product>();
  work->calls = calls;
  work->form = form_for(call);
  size_t bytes = (work->form->packed_bytes(call) + kAlign - 1) / kAlign * kAlign;
  work->packed.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlign, bytes ? bytes : kAlign)));
  if (!work->packed) return false;
  work->form->pack(call, work->packed.get());
  int64_t row_bytes = call.row_bytes() > 0 ? call.row_bytes() : 1;
  int64_t cost = row_bytes * outputs * (1 + call.columns / 8);
  Helpers helpers(cost, threads);
  work->units = work->chunk = outputs;
  if (helpers.most > 0) {
    int64_t rows = kChunkBytes / row_bytes, fair = outputs / (4 * threads);
    rows = rows < fair ? rows : fair;
    int64_t tile = call.quantized ? 16 : 24;  // whole tiles of every form
    work->chunk = (rows > tile ? rows : tile) / tile * tile;
  }
  all_of(work, helpers, schedule);
  return true;
}

// False where memory is short.
template <class Schedule>
bool attend(const Attention& call, int64_t threads, Schedule&& schedule) {
  if (call.units() == 0 || call.dim == 0) return true;
  auto work = std::make_shared<Heads>();
  work->call = call;
  work->form = attention_form();
  work->units = call.units();
  int64_t seen = call.columns * call.rows;
  for (int64_t row = 0; call.keys != nullptr && row < call.rows; row++) seen += call.length[row];
  int64_t cost = seen * call.kv_heads * call.dim * 8 * (1 + call.queries() / 8);
  all_of(work, Helpers(cost, threads), schedule);
  return !work->short_of_memory.load(std::memory_order_relaxed);
}

}  // namespace specjax

#endif  // SPECJAX_CPU_MATMUL_DISPATCH_H_
