// What XLA calls, and what Python asks by ctypes.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dispatch.h"
#include "xla/ffi/api/ffi.h"

#define SPECJAX_EXPORT extern "C" __attribute__((visibility("default")))

SPECJAX_EXPORT XLA_FFI_Error* specjax_cpu_matmul(XLA_FFI_CallFrame*);
SPECJAX_EXPORT XLA_FFI_Error* specjax_cpu_experts(XLA_FFI_CallFrame*);
SPECJAX_EXPORT XLA_FFI_Error* specjax_cpu_attention(XLA_FFI_CallFrame*);
SPECJAX_EXPORT XLA_FFI_Error* specjax_host_call(XLA_FFI_CallFrame*);

namespace specjax {
namespace {

namespace ffi = xla::ffi;

std::string shape_of(const ffi::AnyBuffer& buffer) {
  std::string shape;
  for (int64_t size : buffer.dimensions()) shape += (shape.empty() ? "[" : ", ") + std::to_string(size);
  return shape.empty() ? "[]" : shape + "]";
}

using Refused = std::function<ffi::Error(const char*)>;

// Sets what a call says of its weights [..., outputs, what a row holds], of which scales and offsets are if they are codes;
// an error where they do not fit. The inputs and outputs of the call are set.
ffi::Error describe_weights(ffi::AnyBuffer weights, std::optional<ffi::AnyBuffer> scale,
                            std::optional<ffi::AnyBuffer> offset, Call& call, const Refused& refused) {
  auto held = weights.dimensions();
  size_t rank = held.size();
  call.weights = static_cast<const uint8_t*>(weights.untyped_data());
  int64_t row = held[rank - 1];
  switch (weights.element_type()) {
    case ffi::F32: call.format = kFloat32; break;
    case ffi::BF16: call.format = kBfloat16; break;
    case ffi::U8: call.format = row == call.inputs ? kInt8 : kInt4; break;
    default: return refused("weights are float32, bfloat16, or bytes of codes");
  }
  if ((call.format == kInt4 ? 2 * row : row) != call.inputs) return refused("a row has other inputs");
  if (call.is_coded() != scale.has_value()) return refused("codes have scales, and others have none");
  if (!call.is_coded()) return ffi::Error::Success();
  auto scales = scale->dimensions();
  switch (scale->element_type()) {
    case ffi::F32: call.scale_type = kScaleFloat32; break;
    case ffi::BF16: call.scale_type = kScaleBfloat16; break;
    case ffi::F16: call.scale_type = kScaleFloat16; break;
    default: return refused("scales are float32, bfloat16 or float16");
  }
  if (scales.size() != rank || scales[rank - 2] != call.outputs) return refused("there are some scales for each row");
  for (size_t i = 0; i + 2 < rank; i++)
    if (held[i] != scales[i]) return refused("scales differ in their first dimensions");
  call.scale = scale->untyped_data(), call.groups = scales[rank - 1];
  int64_t unit = call.format == kInt8 && !call.quantized ? kHalf : kUnit;
  bool fits = call.groups > 0 && call.inputs % call.groups == 0 && call.inputs / call.groups % unit == 0;
  if (call.groups != 1 && !fits) return refused("there is another number of scales");
  if (!offset) return ffi::Error::Success();
  auto offsets = offset->dimensions();
  if (offset->element_type() != scale->element_type() ||
      !std::equal(offsets.begin(), offsets.end(), scales.begin(), scales.end()))
    return refused("offsets are as scales are");
  call.offset = offset->untyped_data();
  return ffi::Error::Success();
}

// Sets what a call is made of, of weights [..., outputs, what a row holds] times x [..., inputs, columns]; an error where
// they do not fit.
ffi::Error describe(ffi::AnyBuffer weights, std::optional<ffi::AnyBuffer> scale, std::optional<ffi::AnyBuffer> offset,
                    ffi::AnyBuffer x, ffi::AnyBuffer out, Call& call) {
  auto held = weights.dimensions(), given = x.dimensions(), made = out.dimensions();
  size_t rank = held.size();
  auto refused = [&](const char* why) {
    return ffi::Error::InvalidArgument("cpu_matmul: weights of " + shape_of(weights) + " times " + shape_of(x) +
                                       " as " + shape_of(out) + ": " + why + ".");
  };
  if (rank < 2 || given.size() != rank || made.size() != rank) return refused("they differ in their dimensions");
  for (size_t i = 0; i + 2 < rank; i++)
    if (held[i] != given[i] || held[i] != made[i]) return refused("they differ in their first dimensions");
  if (x.element_type() != ffi::F32 || out.element_type() != ffi::F32) return refused("columns are float32");
  call.x = static_cast<const float*>(x.untyped_data()), call.out = static_cast<float*>(out.untyped_data());
  call.outputs = held[rank - 2], call.inputs = given[rank - 2], call.columns = given[rank - 1];
  if (made[rank - 2] != call.outputs || made[rank - 1] != call.columns) return refused("the result has another shape");
  if (call.columns > kMostColumns) return refused("there are more than 64 columns");
  return describe_weights(weights, scale, offset, call, refused);
}

// The same of weights [experts, outputs, what a row holds] times those columns of x [inputs, columns] that are an expert's:
// each of `pairs` has one, as an expert that a column chose.
ffi::Error describe_experts(ffi::AnyBuffer weights, std::optional<ffi::AnyBuffer> scale,
                            std::optional<ffi::AnyBuffer> offset, ffi::AnyBuffer x, int64_t pairs, ffi::AnyBuffer out,
                            Call& call) {
  auto held = weights.dimensions(), given = x.dimensions(), made = out.dimensions();
  auto refused = [&](const char* why) {
    return ffi::Error::InvalidArgument("cpu_experts: weights of " + shape_of(weights) + " times " + shape_of(x) +
                                       " as " + shape_of(out) + ": " + why + ".");
  };
  if (held.size() != 3 || given.size() != 2 || made.size() != 2) return refused("they have other dimensions");
  if (x.element_type() != ffi::F32 || out.element_type() != ffi::F32) return refused("columns are float32");
  call.x = static_cast<const float*>(x.untyped_data()), call.out = static_cast<float*>(out.untyped_data());
  call.outputs = held[1], call.inputs = given[0], call.columns = given[1];
  if (made[0] != call.outputs || made[1] != pairs) return refused("the result has another shape");
  if (call.columns == 0 ? pairs != 0 : pairs % call.columns != 0) return refused("columns have as many experts each");
  return describe_weights(weights, scale, offset, call, refused);
}

// Gives of matrix `m` of `matrices`, which lie in `rest` before the scales of all and the offsets of all, its own parts.
ffi::Error parts_of(const ffi::RemainingArgs& rest, size_t matrices, size_t parts, size_t m,
                    std::optional<ffi::AnyBuffer> found[3]) {
  for (size_t part = 0; part < parts; part++) {
    auto own = rest.get<ffi::AnyBuffer>(part * matrices + m);
    if (!own) return ffi::Error::InvalidArgument("cpu_matmul: weights, scales and offsets are arrays.");
    found[part] = *own;
  }
  return ffi::Error::Success();
}

// Calls describe(parts, result, call) of each of the matrices in `rest`; an error where they are not alike.
template <class Describe>
ffi::Error describe_all(const ffi::RemainingArgs& rest, const ffi::RemainingRets& outs, bool rounded, bool quantized,
                        bool has_table, std::vector<Call>& calls, Describe&& describe) {
  auto refused = [](const char* why) {
    return ffi::Error::InvalidArgument(std::string("cpu_matmul: ") + why + ".");
  };
  size_t matrices = outs.size(), parts = matrices == 0 ? 0 : (rest.size() - has_table) / matrices;
  if (parts < 1 || parts > 3 || rest.size() != parts * matrices + has_table)
    return refused("there is another number of matrices");
  const float* table = nullptr;
  if (has_table) {
    auto own = rest.get<ffi::AnyBuffer>(rest.size() - 1);
    if (!own || own->element_type() != ffi::F32 || own->dimensions().size() == 0 || own->dimensions().back() != 16)
      return refused("a table has 16 numbers of float32");
    table = static_cast<const float*>(own->untyped_data());
  }
  calls.resize(matrices);
  for (size_t m = 0; m < matrices; m++) {
    auto out = outs.get<ffi::AnyBuffer>(m);
    if (!out) return refused("results are arrays");
    Call& call = calls[m];
    call.rounded = rounded, call.quantized = quantized, call.table = table;
    std::optional<ffi::AnyBuffer> own[3];
    if (ffi::Error error = parts_of(rest, matrices, parts, m, own); error.failure()) return error;
    if (ffi::Error error = describe(own, **out, call); error.failure()) return error;
    if (call.format != calls[0].format || call.groups != calls[0].groups)
      return refused("matrices of one call have one dtype and as many scales a row");
    if (quantized && (rounded || !call.is_coded())) return refused("columns in 8 bits multiply codes, and are not rounded");
    if (has_table && (call.format != kInt4 || call.offset != nullptr || quantized))
      return refused("codes of 4 bits alone have a table, without offsets, for columns that are no codes");
  }
  return ffi::Error::Success();
}

// Some matrices times the same x: `rest` are all of them, then the scales of each where they are codes, then their offsets
// where they have some, and the table of all, where they have one.
ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, bool rounded, bool quantized,
                  bool has_table, ffi::RemainingRets outs) {
  std::vector<Call> calls;
  auto each = [&](auto* own, ffi::AnyBuffer out, Call& call) { return describe(*own[0], own[1], own[2], x, out, call); };
  ffi::Error error = describe_all(rest, outs, rounded, quantized, has_table, calls, each);
  if (error.failure()) return error;
  auto given = x.dimensions();
  int64_t count = 1;
  for (size_t i = 0; i + 2 < given.size(); i++) count *= given[i];
  for (int64_t i = 0; i < count; i++) {
    if (!multiply(calls, pool.num_threads(), [&](auto task) { pool.Schedule(std::move(task)); }))
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, "cpu_matmul: no memory for a copy of the columns.");
    for (Call& call : calls) call.step();
  }
  return ffi::Error::Success();
}

// The matrices of some experts times the columns that chose each: `chosen` is [experts of a column, columns], and x has
// these columns, or one for each expert of each. `rest` is as above.
ffi::Error experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> chosen, ffi::RemainingArgs rest,
                   bool rounded, bool quantized, bool has_table, ffi::RemainingRets outs) {
  std::vector<Call> calls;
  int64_t pairs = chosen.element_count(), count = -1;
  bool alike = true;
  auto each = [&](auto* own, ffi::AnyBuffer out, Call& call) {
    ffi::Error error = describe_experts(*own[0], own[1], own[2], x, pairs, out, call);
    if (error.failure()) return error;
    int64_t held = own[0]->dimensions()[0];
    alike = alike && (count == -1 || count == held);
    count = held;
    return error;
  };
  ffi::Error error = describe_all(rest, outs, rounded, quantized, has_table, calls, each);
  if (error.failure()) return error;
  if (!alike) return ffi::Error::InvalidArgument("cpu_experts: matrices have as many experts each.");
  if (!multiply_chosen(calls, Chosen{chosen.typed_data(), pairs, count}, pool.num_threads(), [&](auto task) { pool.Schedule(std::move(task)); }))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "cpu_experts: no memory for a copy of the columns.");
  return ffi::Error::Success();
}

bool is(const ffi::AnyBuffer& buffer, ffi::DataType type, std::initializer_list<int64_t> shape) {
  auto own = buffer.dimensions();
  return buffer.element_type() == type && std::equal(own.begin(), own.end(), shape.begin(), shape.end());
}

// `rest` are, as far as they are there: the tree's mask; the keys, values and lengths of a prefix; the first slots that
// nodes see; which pages of the cache a row has; the sinks of heads.
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer block_keys, ffi::AnyBuffer block_values,
                     ffi::RemainingArgs rest, bool has_mask, bool has_prefix, bool has_first, bool has_pages,
                     bool has_sinks, int64_t window, ffi::Result<ffi::AnyBuffer> out) {
  auto refused = [&](const std::string& what) {
    return ffi::Error::InvalidArgument("cpu_attention: queries of " + shape_of(query) + " and keys of " +
                                       shape_of(block_keys) + ": " + what + ".");
  };
  auto asked = query.dimensions(), held = block_keys.dimensions();
  if (asked.size() != 4 || held.size() != 4) return refused("they have four dimensions");
  Attention call{};
  call.rows = asked[0], call.heads = asked[1], call.nodes = asked[2], call.dim = asked[3];
  call.kv_heads = held[1], call.columns = held[2];
  if (call.kv_heads == 0 || call.heads % call.kv_heads != 0) return refused("their heads do not divide");
  if (call.dim % kFeatures != 0) return refused("features are a multiple of 16");
  auto f32 = ffi::F32;
  if (!is(query, f32, {call.rows, call.heads, call.nodes, call.dim}) ||
      !is(*out, f32, {call.rows, call.heads, call.nodes, call.dim}) ||
      !is(block_keys, f32, {call.rows, call.kv_heads, call.columns, call.dim}) ||
      !is(block_values, f32, {call.rows, call.kv_heads, call.columns, call.dim}))
    return refused("the block does not fit");
  call.query = static_cast<const float*>(query.untyped_data());
  call.block_keys = static_cast<const float*>(block_keys.untyped_data());
  call.block_values = static_cast<const float*>(block_values.untyped_data());
  call.out = static_cast<float*>(out->untyped_data());
  call.scale = 1 / std::sqrt(static_cast<float>(call.dim));
  call.window = window;
  if (static_cast<size_t>(has_mask + 3 * has_prefix + has_first + has_pages + has_sinks) != rest.size())
    return refused("there is another number of operands");
  if (!has_prefix && (has_first || has_pages)) return refused("there is no prefix");
  if (!has_mask && (has_prefix || call.columns != call.nodes))
    return refused("a plain sequence has no prefix, and as many keys as queries");
  size_t next = 0;
  if (has_mask) {
    auto mask = rest.get<ffi::AnyBuffer>(next++);
    if (!mask || !is(*mask, ffi::PRED, {call.rows, call.nodes, call.columns})) return refused("the block does not fit");
    call.tree_mask = static_cast<const uint8_t*>(mask->untyped_data());
  }
  if (has_prefix) {
    auto keys = rest.get<ffi::AnyBuffer>(next++), values = rest.get<ffi::AnyBuffer>(next++);
    auto length = rest.get<ffi::AnyBuffer>(next++);
    if (!keys || !values || !length || keys->dimensions().size() != 4) return refused("there is no prefix");
    call.held = keys->dimensions()[0], call.page = keys->dimensions()[3], call.row_pages = 1;
    if (!is(*keys, f32, {call.held, call.kv_heads, call.dim, call.page}) ||
        !is(*values, f32, {call.held, call.kv_heads, call.page, call.dim}) || !is(*length, ffi::S32, {call.rows}) ||
        (has_pages ? call.held == 0 && call.rows > 0 : call.held != call.rows))
      return refused("the prefix does not fit");
    call.keys = static_cast<const float*>(keys->untyped_data());
    call.values = static_cast<const float*>(values->untyped_data());
    call.length = static_cast<const int32_t*>(length->untyped_data());
  }
  if (has_first) {
    auto first = rest.get<ffi::AnyBuffer>(next++);
    if (!first || !is(*first, ffi::S32, {call.rows, call.nodes})) return refused("`first` does not fit");
    call.first = static_cast<const int32_t*>(first->untyped_data());
  }
  if (has_pages) {
    auto pages = rest.get<ffi::AnyBuffer>(next++);
    if (!pages || pages->dimensions().size() != 2) return refused("`pages` does not fit");
    call.row_pages = pages->dimensions()[1];
    if (!is(*pages, ffi::S32, {call.rows, call.row_pages})) return refused("`pages` does not fit");
    if (call.row_pages > 1 && call.page % kPage != 0)
      return refused("a page has " + std::to_string(call.page) + " slots, which " + std::to_string(kPage) +
                     " does not divide");
    call.pages = static_cast<const int32_t*>(pages->untyped_data());
  }
  if (has_sinks) {
    auto sinks = rest.get<ffi::AnyBuffer>(next++);
    if (!sinks || !is(*sinks, f32, {call.rows, call.heads})) return refused("`sinks` does not fit");
    call.sinks = static_cast<const float*>(sinks->untyped_data());
  }
  if (!attend(call, pool.num_threads(), [&](auto task) { pool.Schedule(std::move(task)); }))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "cpu_attention: no memory for scores.");
  return ffi::Error::Success();
}

constexpr int64_t kMessage = 512;

// Given the question, what it is about and where the answer belongs, each with its size; the last are for a message of
// why there is none, which is said by giving another number than 0.
using Answer = int (*)(const char*, int64_t, const int32_t*, int64_t, int64_t, int32_t*, int64_t, char*, int64_t);

std::atomic<Answer> answer{nullptr};

ffi::Error host_call(ffi::Buffer<ffi::S32> given, std::string_view question,
                     ffi::Result<ffi::Buffer<ffi::S32>> found) {
  Answer ask = answer.load();
  if (ask == nullptr) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "host_call: nobody answers.");
  auto sizes = given.dimensions();
  if (sizes.size() != 2) return ffi::Error::InvalidArgument("host_call: what is given has rows and columns.");
  char message[kMessage] = "";
  int failed = ask(question.data(), question.size(), given.typed_data(), sizes[0], sizes[1], found->typed_data(),
                   found->element_count(), message, kMessage);
  return failed ? ffi::Error::Internal(message) : ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_cpu_matmul, specjax::matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Attr<bool>("rounded")
                                  .Attr<bool>("quantized")
                                  .Attr<bool>("has_table")
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_cpu_experts, specjax::experts,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .Attr<bool>("rounded")
                                  .Attr<bool>("quantized")
                                  .Attr<bool>("has_table")
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_cpu_attention, specjax::attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Attr<bool>("has_mask")
                                  .Attr<bool>("has_prefix")
                                  .Attr<bool>("has_first")
                                  .Attr<bool>("has_pages")
                                  .Attr<bool>("has_sinks")
                                  .Attr<int64_t>("window")
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_host_call, specjax::host_call,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<std::string_view>("question")
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());

// Raised where a call changes, so that a library of other sources is not taken.
SPECJAX_EXPORT int specjax_cpu_matmul_version() { return 9; }

SPECJAX_EXPORT const char* specjax_cpu_matmul_selected() { return specjax::selected(); }

SPECJAX_EXPORT int specjax_cpu_matmul_select(const char* name) { return specjax::select(name) ? 1 : 0; }

SPECJAX_EXPORT void specjax_answer_host_calls(specjax::Answer answer) { specjax::answer.store(answer); }
