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

using Memory = std::unique_ptr<uint8_t, void (*)(void*)>;

// So many bytes, and at least some; null where memory is short.
inline Memory memory(size_t bytes) {
  bytes = (bytes + kAlign - 1) / kAlign * kAlign;
  return Memory(static_cast<uint8_t*>(std::aligned_alloc(kAlign, bytes ? bytes : kAlign)), std::free);
}

// A matrix times some columns, which are packed. Where they are some of a larger product's, `places` says which of its
// columns each one is.
struct Part {
  Call call;
  const Form* form;
  const uint8_t* packed;
  int64_t units;  // its outputs, or so many more that whole chunks are whole tiles of it
  const int32_t* places = nullptr;
  float* whole = nullptr;  // [outputs, columns of the larger product]
  int64_t whole_columns = 0;

  // `scratch` grows to hold some rows of the result where these have places.
  void run(int64_t begin, int64_t end, std::vector<float>& scratch) const {
    if (places == nullptr) return form->rows(call, packed, begin, end);
    size_t needed = (end - begin) * call.columns;
    if (scratch.size() < needed) scratch.resize(needed);
    Call own = call;
    own.out = scratch.data() - begin * call.columns;
    form->rows(own, packed, begin, end);
    for (int64_t row = begin; row < end; row++) {
      const float* made = own.out + row * call.columns;
      for (int64_t c = 0; c < call.columns; c++) whole[row * whole_columns + places[c]] = made[c];
    }
  }
};

// The outputs of some parts, one after the other.
struct Product : Work {
  std::vector<Part> parts;
  std::vector<Memory> held;

  void run(int64_t begin, int64_t end) override {
    static thread_local std::vector<float> scratch;
    for (const Part& part : parts) {
      int64_t last = end < part.call.outputs ? end : part.call.outputs;
      if (begin < last) part.run(begin > 0 ? begin : 0, last, scratch);
      begin -= part.units, end -= part.units;
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

// Whole tiles of every form.
inline int64_t tile_rows(const Call& call) { return call.quantized ? 16 : 24; }

// Does the parts of a product whose units and parts are set. What they cost is as above.
template <class Schedule>
void do_product(const std::shared_ptr<Product>& work, int64_t cost, int64_t threads, Schedule&& schedule) {
  const Call& call = work->parts[0].call;
  int64_t row_bytes = call.row_bytes() > 0 ? call.row_bytes() : 1;
  Helpers helpers(cost, threads);
  work->units = 0;
  for (const Part& part : work->parts) work->units += part.units;
  work->chunk = work->units;
  if (helpers.most > 0) {
    int64_t rows = kChunkBytes / row_bytes, fair = work->units / (4 * threads), tile = tile_rows(call);
    rows = rows < fair ? rows : fair;
    work->chunk = (rows > tile ? rows : tile) / tile * tile;
  }
  all_of(work, helpers, schedule);
}

inline int64_t cost_of(const Call& call) {
  int64_t row_bytes = call.row_bytes() > 0 ? call.row_bytes() : 1;
  return row_bytes * call.outputs * (1 + call.columns / 8);
}

// Matrices of one format times the same columns, at least one. False where memory is short.
template <class Schedule>
bool multiply(const std::vector<Call>& calls, int64_t threads, Schedule&& schedule) {
  const Call& call = calls[0];
  int64_t outputs = 0, cost = 0;
  for (const Call& each : calls) outputs += each.outputs, cost += cost_of(each);
  if (outputs == 0 || call.columns == 0) return true;
  auto work = std::make_shared<Product>();
  const Form* form = form_for(call);
  work->held.push_back(memory(form->packed_bytes(call)));
  uint8_t* packed = work->held[0].get();
  if (packed == nullptr) return false;
  form->pack(call, packed);
  for (const Call& each : calls) work->parts.push_back({each, form, packed, each.outputs});
  do_product(work, cost, threads, schedule);
  return true;
}

constexpr size_t kMostPacked = size_t{8} << 20;

// Which of some experts each pair of a column and one of its experts is of; those that are of none give zeros.
struct Chosen {
  const int32_t* expert;  // [pairs], the columns after one another for the first expert of each, then for the second...
  int64_t pairs, experts;
};

// Matrices [experts, outputs, inputs] of one format times the columns that chose each expert, of which none is read that
// nobody chose. `calls` are those of the first expert, with x [inputs, columns] and out [outputs, pairs]; there are as
// many columns as pairs, or a pair's is its number modulo the columns. What a pair gives depends on its column and expert
// alone. Columns are packed for some experts at a time. False where memory is short.
template <class Schedule>
bool multiply_chosen(const std::vector<Call>& calls, const Chosen& chosen, int64_t threads, Schedule&& schedule) {
  if (chosen.pairs == 0) return true;
  std::vector<std::vector<int32_t>> places(chosen.experts);
  std::vector<int32_t> of_none;
  for (int64_t pair = 0; pair < chosen.pairs; pair++) {
    int32_t expert = chosen.expert[pair];
    bool is_one = expert >= 0 && expert < chosen.experts;
    (is_one ? places[expert] : of_none).push_back(static_cast<int32_t>(pair));
  }
  for (const Call& call : calls)
    for (int64_t row = 0; row < call.outputs && !of_none.empty(); row++)
      for (int32_t pair : of_none) call.out[row * chosen.pairs + pair] = 0;
  auto work = std::make_shared<Product>();
  int64_t cost = 0;
  size_t held = 0;
  for (int64_t expert = 0; expert < chosen.experts; expert++) {
    const std::vector<int32_t>& own = places[expert];
    for (size_t begin = 0; begin < own.size(); begin += kMostColumns) {
      int64_t columns = static_cast<int64_t>(own.size() - begin) < kMostColumns ? own.size() - begin : kMostColumns;
      Memory x = memory(calls[0].inputs * columns * 4);
      if (!x) return false;
      auto gathered = reinterpret_cast<float*>(x.get());
      for (int64_t i = 0; i < calls[0].inputs; i++)
        for (int64_t c = 0; c < columns; c++)
          gathered[i * columns + c] = calls[0].x[i * calls[0].columns + own[begin + c] % calls[0].columns];
      const uint8_t* packed = nullptr;
      for (const Call& all : calls) {
        Call call = all;
        call.skip(expert);
        call.x = gathered, call.columns = columns;
        const Form* form = form_for(call);
        if (packed == nullptr) {
          Memory room = memory(form->packed_bytes(call));
          if (!room) return false;
          form->pack(call, room.get());
          packed = room.get();
          held += form->packed_bytes(call);
          work->held.push_back(std::move(room));
        }
        int64_t tile = tile_rows(call), units = (call.outputs + tile - 1) / tile * tile;
        work->parts.push_back({call, form, packed, units, own.data() + begin, all.out, chosen.pairs});
        cost += cost_of(call);
      }
      if (held > kMostPacked) {
        do_product(work, cost, threads, schedule);
        work = std::make_shared<Product>();
        cost = 0, held = 0;
      }
    }
  }
  if (!work->parts.empty()) do_product(work, cost, threads, schedule);
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
