#include "python/src/serving.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "longspan/buffer.hpp"
#include "longspan/error.hpp"
#include "longspan/limits.hpp"
#include "longspan/merge.hpp"
#include "longspan/serving.hpp"
#include "python/src/arrays.hpp"
#include "python/src/communicators.hpp"
#include "python/src/dtypes.hpp"
#include "python/src/errors.hpp"
#include "python/src/options.hpp"
#include "python/src/plans.hpp"
#if defined(LONGSPAN_HAVE_CUDA) && !defined(LONGSPAN_SIMULATED)
#include <cuda_runtime_api.h>
#endif

namespace longspan::python {
namespace {

/// The kernels of one device, and scratch memory by stream: work that is queued on a stream comes
/// after earlier uses of the memory.
class Ops {
 public:
  Ops(Device device, int gpu) : device_(device), gpu_(gpu), ops_(device, 0, gpu) {}

  bool serves(Device device, int gpu) const { return device == device_ && gpu == gpu_; }

  /// Without the GIL, and one call at a time: call(ops).
  template <class Callable>
  void run(const Callable& call) {
    const nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    call(ops_);
  }

  /// The same with args.attention.workspace filled in.
  template <class Args, class Callable>
  void run_in_workspace(Args& args, Stream stream, const Callable& call) {
    run([&](const ServingOps& ops) {
      args.attention.workspace = take(ops.workspace_bytes(args), stream);
      call(ops);
    });
  }

  /// call(ops, memory) with memory of bytes(ops).
  template <class Bytes, class Callable>
  void run_in_memory(const Bytes& bytes, Stream stream, const Callable& call) {
    run([&](const ServingOps& ops) { call(ops, take(bytes(ops), stream)); });
  }

 private:
  struct Memory {
    void* stream;
    Buffer buffer;
  };

  Workspace take(std::size_t bytes, Stream stream) {
    void* const key = device_ == Device::host ? nullptr : stream.handle;
    auto found = std::find_if(memory_.begin(), memory_.end(),
                              [&](const Memory& m) { return m.stream == key; });
    if (found == memory_.end()) {
      memory_.push_back({key, {}});
      found = std::prev(memory_.end());
    }
    if (found->buffer.bytes() < bytes) {
      found->buffer = {};  // on a GPU this waits for what uses it
      const Communicator world = self(device_, gpu_);
      world.make_current();
      found->buffer = Buffer(device_, bytes + bytes / 2);
    }
    return {found->buffer.data(), found->buffer.bytes()};
  }

  Device device_;
  int gpu_;
  ServingOps ops_;
  std::mutex mutex_;
  std::vector<Memory> memory_;
};

std::vector<std::unique_ptr<Ops>>& all_ops() {
  static auto* const made = new std::vector<std::unique_ptr<Ops>>;
  return *made;
}

Ops& ops_for(const Array& array) {
  const Device device = array.required().tensor().device;
  for (const auto& ops : all_ops())
    if (ops->serves(device, array.gpu())) return *ops;
  all_ops().push_back(std::make_unique<Ops>(device, array.gpu()));
  return *all_ops().back();
}

LogBase base_of(Argument<"base"> given) {
  if (PyUnicode_Check(given.ptr())) {
    if (text(given) == "e") return LogBase::e;
  } else if (integer(given) == 2) {
    return LogBase::two;
  }
  throw InputError("base is " + nb::cast<std::string>(nb::repr(given)) +
                   "; 'e' (natural logarithms) and 2 are supported");
}

Lse lse_view(const Tensor& t, bool heads_first) {
  return heads_first ? Lse::heads_tokens(t) : Lse::tokens_heads(t);
}

/// Checks that every array is on the GPU of the first.
void check_same_gpu(std::initializer_list<std::pair<const Array*, const char*>> arrays) {
  const Array& first = *arrays.begin()->first;
  for (const auto& [array, name] : arrays)
    if (*array && array->gpu() >= 0 && first.gpu() >= 0 && array->gpu() != first.gpu())
      throw InputError(std::string(name) + " lies on GPU " + std::to_string(array->gpu()) +
                       ", and " + arrays.begin()->second + " on GPU " +
                       std::to_string(first.gpu()));
}

/// Waits for the work that is queued on the stream.
void wait_for([[maybe_unused]] const Array& on, [[maybe_unused]] Stream stream) {
#if defined(LONGSPAN_HAVE_CUDA) && !defined(LONGSPAN_SIMULATED)
  if (on.tensor().device != Device::cuda) return;
  const nb::gil_scoped_release released;
  const cudaError_t status = cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle));
  if (status != cudaSuccess) throw BackendError(cudaGetErrorString(status));
#endif
}

/// Makes the result; waits first where it is made from our memory.
nb::object finished(Result& out, Result& lse, const Array& like, Stream stream, bool with_lse) {
  if (out.needs_wait() || lse.needs_wait()) wait_for(like, stream);
  nb::object made = out.finish();
  return with_lse ? nb::object(nb::make_tuple(made, lse.finish())) : made;
}

nb::object merge_attn_states(Argument<"prefix_output"> prefix_output,
                             Argument<"prefix_lse"> prefix_lse,
                             Argument<"suffix_output"> suffix_output,
                             Argument<"suffix_lse"> suffix_lse, Argument<"base"> base,
                             Argument<"heads_first"> heads_first, Argument<"out"> given_out,
                             Argument<"lse"> given_lse,
                             Argument<"prefill_tokens_with_context"> prefill_tokens_with_context,
                             Argument<"out_scale"> out_scale, Argument<"prefix_scale"> prefix_scale,
                             Argument<"suffix_scale"> suffix_scale,
                             Argument<"nan_is_empty"> nan_is_empty, Argument<"stream"> stream) {
  const Array prefix(prefix_output), prefix_l(prefix_lse), suffix(suffix_output),
      suffix_l(suffix_lse), own_out(given_out), own_lse(given_lse), scale(out_scale, DType::fp32),
      scale_a(prefix_scale, DType::fp32), scale_b(suffix_scale, DType::fp32);
  const bool is_first = flag(heads_first);
  Ops& ops = ops_for(prefix);
  const Tensor &a = prefix.tensor(), &la = prefix_l.required().tensor();
  prefix.floats();
  suffix.required().floats();
  suffix_l.required();
  check_same_gpu({{&prefix, "prefix_output"},
                  {&prefix_l, "prefix_lse"},
                  {&suffix, "suffix_output"},
                  {&suffix_l, "suffix_lse"},
                  {&scale, "out_scale"},
                  {&scale_a, "prefix_scale"},
                  {&scale_b, "suffix_scale"},
                  {&own_out, "out"},
                  {&own_lse, "lse"}});
  const LogBase of_base = base_of(base);
  own_out.floats();
  Result out =
      result_of(own_out, prefix, {a.shape.data(), static_cast<std::size_t>(a.dims)}, a.dtype);
  Result lse = result_of(own_lse, prefix_l, {la.shape.data(), static_cast<std::size_t>(la.dims)},
                         DType::fp32);
  MergeAttnStates args{.out = out.tensor(),
                       .out_lse = lse_view(lse.tensor(), is_first),
                       .prefix_out = a,
                       .prefix_lse = lse_view(la, is_first),
                       .suffix_out = suffix.tensor(),
                       .suffix_lse = lse_view(suffix_l.tensor(), is_first),
                       .prefill_tokens_with_context = maybe_integer(prefill_tokens_with_context),
                       .out_scale = scale.tensor(),
                       .nan_is_empty = flag(nan_is_empty),
                       .prefix_scale = scale_a.tensor(),
                       .suffix_scale = scale_b.tensor()};
  const Stream queue = stream_of(stream, prefix);
  ops.run([&](const ServingOps& o) { o.merge_attn_states(args, of_base, queue); });
  return finished(out, lse, prefix, queue, true);
}

/// The same under FlashInfer's names.
nb::object merge_state(Argument<"v_a"> v_a, Argument<"s_a"> s_a, Argument<"v_b"> v_b,
                       Argument<"s_b"> s_b, Argument<"base"> base,
                       Argument<"nan_is_empty"> nan_is_empty, Argument<"out"> out,
                       Argument<"lse"> lse, Argument<"stream"> stream) {
  const nb::handle none = Py_None;
  return merge_attn_states(
      Argument<"prefix_output">(v_a), Argument<"prefix_lse">(s_a), Argument<"suffix_output">(v_b),
      Argument<"suffix_lse">(s_b), base, Argument<"heads_first">(Py_False), out, lse,
      Argument<"prefill_tokens_with_context">(none), Argument<"out_scale">(none),
      Argument<"prefix_scale">(none), Argument<"suffix_scale">(none), nan_is_empty, stream);
}

/// Parts in the first dimension, or in the second, as in FlashInfer.
Tensor parts_first(Tensor t) {
  if (t.dims < 2) return t;
  std::swap(t.shape[0], t.shape[1]);
  std::swap(t.stride[0], t.stride[1]);
  return t;
}

nb::object merge_states(Argument<"v"> v, Argument<"s"> s, Argument<"base"> base,
                        Argument<"out"> given_out, Argument<"lse"> given_lse,
                        Argument<"out_scale"> out_scale, Argument<"part_scales"> part_scales,
                        Argument<"nan_is_empty"> nan_is_empty, Argument<"stream"> stream) {
  const Array parts(v), lses(s), own_out(given_out), own_lse(given_lse),
      scale(out_scale, DType::fp32), scales(part_scales, DType::fp32);
  Ops& ops = ops_for(parts);
  const Tensor &p = parts.tensor(), &l = lses.required().tensor();
  check_same_gpu({{&parts, "v"},
                  {&lses, "s"},
                  {&scale, "out_scale"},
                  {&scales, "part_scales"},
                  {&own_out, "out"},
                  {&own_lse, "lse"}});
  if (p.dims != 4 || l.dims != 3)
    throw InputError("v has " + std::to_string(p.dims) + " dimensions and s " +
                     std::to_string(l.dims) +
                     "; [tokens, parts, heads, dim] and [tokens, parts, heads] are wanted");
  const LogBase of_base = base_of(base);
  const std::array<std::int64_t, 3> rows{p.shape[0], p.shape[2], p.shape[3]};
  for (const Array* array : {&parts, &own_out}) array->floats();
  Result out = result_of(own_out, parts, rows, p.dtype);
  Result lse = result_of(own_lse, lses, {rows.data(), 2}, DType::fp32);
  const MergeStates args{.out = out.tensor(),
                         .out_lse = Lse::tokens_heads(lse.tensor()),
                         .parts = parts_first(p),
                         .lses = Lse::tokens_heads(parts_first(l)),
                         .out_scale = scale.tensor(),
                         .nan_is_empty = flag(nan_is_empty),
                         .part_scales = scales.tensor()};
  const Stream queue = stream_of(stream, parts);
  ops.run([&](const ServingOps& o) { o.merge_states(args, of_base, queue); });
  return finished(out, lse, parts, queue, true);
}

/// Across the ranks of `comm`: the first call makes the merge, for up to as many tokens.
nb::object cross_rank_merge(Argument<"comm"> comm, Argument<"part"> part,
                            Argument<"part_lse"> part_lse, Argument<"base"> base,
                            Argument<"scatter_heads"> scatter_heads,
                            Argument<"nan_is_empty"> nan_is_empty,
                            Argument<"part_scale"> part_scale, Argument<"out_scale"> out_scale,
                            Argument<"out"> given_out, Argument<"lse"> given_lse,
                            Argument<"stream"> stream) {
  const Array own(part), own_lse(part_lse), own_scale(part_scale, DType::fp32),
      scale(out_scale, DType::fp32), to_out(given_out), to_lse(given_lse);
  const Tensor &p = own.required().tensor(), &l = own_lse.required().tensor();
  check_same_gpu({{&own, "part"},
                  {&own_lse, "part_lse"},
                  {&own_scale, "part_scale"},
                  {&scale, "out_scale"},
                  {&to_out, "out"},
                  {&to_lse, "lse"}});
  if (p.dims != 3 || l.dims != 2)
    throw InputError("part has " + std::to_string(p.dims) + " dimensions and part_lse " +
                     std::to_string(l.dims) +
                     "; [tokens, heads, dim] and [tokens, heads] are wanted");
  const LogBase of_base = base_of(base);
  const nb::object held = comm_or_default(comm, p.device, own.gpu());
  Comm& ranks = comm_of(held);
  const bool scatter = flag(scatter_heads);
  const int size = scatter ? ranks.world().size() : 1;
  if (p.shape[1] > std::numeric_limits<int>::max() || p.shape[2] > std::numeric_limits<int>::max())
    throw InputError("part has more heads or columns than are possible");
  if (p.shape[1] % size != 0)
    throw InputError("part has " + std::to_string(p.shape[1]) + " heads, which " +
                     std::to_string(size) + " ranks cannot share evenly");
  const std::array<std::int64_t, 3> rows{p.shape[0], p.shape[1] / size, p.shape[2]};
  for (const Array* array : {&own, &to_out}) array->floats();
  Result out = result_of(to_out, own, rows, p.dtype);
  Result lse = result_of(to_lse, own_lse, {rows.data(), 2}, DType::fp32);
  const MergeOptions options{.heads = static_cast<int>(p.shape[1]),
                             .value_dim = static_cast<int>(p.shape[2]),
                             .dtype = p.dtype,
                             .out_dtype = out.tensor().dtype,
                             .max_tokens = rounded_up(p.shape[0]),
                             .scatter_heads = scatter,
                             .nan_is_empty = flag(nan_is_empty)};
  const MergeArgs args{.part = p,
                       .part_lse = Lse::tokens_heads(l),
                       .part_scale = own_scale.tensor(),
                       .out = out.tensor(),
                       .lse = Lse::tokens_heads(lse.tensor()),
                       .out_scale = scale.tensor()};
  const Stream queue = stream_of(stream, own);
  ranks.alone([&](const Communicator& world) {
    CrossRankMerge& merge = ranks.kept_layers().find(world, options, of_base);
    merge.run(args, queue);
    if (out.needs_wait() || lse.needs_wait()) merge.wait(queue);
  });
  return nb::make_tuple(out.finish(), lse.finish());
}

/// The arguments of both calls over a paged cache.
constexpr NameList kPaged = [] {
  NameList names{"q",
                 "k_cache",
                 "v_cache",
                 "block_table",
                 "cache_seqlens",
                 "cu_seqlens_q",
                 "alibi_slopes",
                 "sinks",
                 "qq_bias",
                 "q_descale",
                 "k_descale",
                 "v_descale",
                 "out_scale",
                 "max_seqlen_q",
                 "max_seqlen_k",
                 "return_lse",
                 "out",
                 "lse",
                 "stream"};
  add_options(names, is_of_scores);
  return names;
}();

/// kPaged, and others.
constexpr NameList paged_and(std::initializer_list<const char*> others) {
  NameList names = kPaged;
  for (const char* const name : others) names.add(name);
  return names;
}
constexpr NameList kSegmented = paged_and({"segments", "segment_keys", "tile", "skip_decode"});
constexpr NameList kContext = paged_and({"k", "v", "skip_decode", "out_scale_inv"});

/// Taken apart from other options: it may be flags of sequences. The limits are not the option's.
constexpr NameList kOtherValues{"causal", "max_seqlen_q", "max_seqlen_k"};

struct PagedCall {
  explicit PagedCall(const Arguments<kPaged>& given)
      : q(given.get<"q">()),
        stream(stream_of(given.get<"stream">(), q.required())),
        k_cache(given.get<"k_cache">()),
        v_cache(given.get<"v_cache">()),
        block_table(Array::table(given.get<"block_table">(), stream)),
        lengths(given.get<"cache_seqlens">(), DType::int32, stream),
        starts(given.get<"cu_seqlens_q">(), DType::int32, stream),
        causal(flags_of(given.get<"causal">()), "causal", DType::uint8, stream),
        slopes(given.get<"alibi_slopes">(), DType::fp32),
        sinks(given.get<"sinks">(), DType::fp32),
        qq_bias(given.get<"qq_bias">()),
        q_scale(given.get<"q_descale">(), DType::fp32),
        k_scale(given.get<"k_descale">(), DType::fp32),
        v_scale(given.get<"v_descale">(), DType::fp32),
        out_scale(given.get<"out_scale">(), DType::fp32),
        given_out(given.get<"out">()),
        given_lse(given.get<"lse">()),
        return_lse(flag(given.get<"return_lse">())) {
    for (const Array* array : {&k_cache, &v_cache, &block_table, &lengths}) array->required();
    for (const Array* array : {&q, &k_cache, &v_cache, &given_out}) array->floats();
    check_same_gpu({{&q, "q"},
                    {&k_cache, "k_cache"},
                    {&v_cache, "v_cache"},
                    {&block_table, "block_table"},
                    {&lengths, "cache_seqlens"},
                    {&starts, "cu_seqlens_q"},
                    {&causal, "causal"},
                    {&slopes, "alibi_slopes"},
                    {&sinks, "sinks"},
                    {&qq_bias, "qq_bias"},
                    {&q_scale, "q_descale"},
                    {&k_scale, "k_descale"},
                    {&v_scale, "v_descale"},
                    {&out_scale, "out_scale"},
                    {&given_out, "out"},
                    {&given_lse, "lse"}});
    const Tensor &rows = q.tensor(), &values = v_cache.tensor(), &keys = k_cache.tensor();
    if (rows.dims != 3 || values.dims != 4 || keys.dims < 4 || keys.dims > 5)
      throw InputError("q, k_cache and v_cache have " + std::to_string(rows.dims) + ", " +
                       std::to_string(keys.dims) + " and " + std::to_string(values.dims) +
                       " dimensions; q is [tokens, heads, head_dim], the caches are [pages, page, "
                       "kv_heads, dim] or x-packed");
    value_dim = values.shape[keys.dims == 5 ? 2 : 3];
    args.q = rows;
    args.k_cache = keys;
    args.v_cache = values;
    args.block_table = block_table.tensor();
    args.query_start = starts.tensor();
    args.kv_len = lengths.tensor();
    args.max_query_len = maybe_integer(given.get<"max_seqlen_q">()).value_or(0);
    args.max_kv_len = maybe_integer(given.get<"max_seqlen_k">()).value_or(0);
    args.out_scale = out_scale.tensor();
    Options options;
    options.mask.causal = given.get<"causal">().ptr() == Py_True;
    take_options<kOtherValues>(options, given);
    args.mask = options.mask;
    args.score = options.score;
    args.causal = causal.tensor();
    args.sinks = sinks.tensor();
    args.slopes = slopes.tensor();
    args.qq_bias = qq_bias.tensor();
    // Only for fp8 the type of the result decides the products.
    if (is_fp8(rows.dtype))
      for (const Tensor* t : std::array<const Tensor*, 3>{&given_out.tensor(), &values, &keys})
        if (t->dims > 0 && is_float(t->dtype) && !is_fp8(t->dtype)) args.dtypes.compute = t->dtype;
    args.q_scale = q_scale.tensor();
    args.k_scale = k_scale.tensor();
    args.v_scale = v_scale.tensor();
  }

  void make_results() {
    const Tensor& rows = q.tensor();
    const std::array<std::int64_t, 3> shape{rows.shape[0], rows.shape[1], value_dim};
    out = result_of(given_out, q, shape, is_fp8(rows.dtype) ? args.dtypes.compute : rows.dtype);
    if (return_lse || given_lse) lse = result_of(given_lse, q, {shape.data(), 2}, DType::fp32);
    args.out = out.tensor();
    if (return_lse || given_lse) args.lse = Lse::tokens_heads(lse.tensor());
  }

  Array q;
  Stream stream;  // of the call
  Array k_cache, v_cache, block_table, lengths, starts, causal, slopes, sinks, qq_bias, q_scale,
      k_scale, v_scale, out_scale, given_out, given_lse;
  bool return_lse;
  std::int64_t value_dim = 0;
  Result out, lse;
  PagedAttention args;
};

nb::object segmented_attention(const Arguments<kSegmented>& given) {
  PagedCall call(given);
  const auto segments = maybe_integer(given.get<"segments">());
  const std::int64_t keys = integer(given.get<"segment_keys">()),
                     tile = integer(given.get<"tile">());
  const bool skip_decode = flag(given.get<"skip_decode">());
  Ops& ops = ops_for(call.q);
  if (!segments) {
    call.make_results();
    SegmentedAttention args{.attention = call.args, .skip_decode = skip_decode};
    ops.run_in_workspace(args, call.stream,
                         [&](const ServingOps& o) { o.segmented_attention(args, call.stream); });
    return finished(call.out, call.lse, call.q, call.stream, call.return_lse);
  }
  if (call.given_out || call.given_lse || call.return_lse)
    throw InputError(
        "segments is given: their states are handed out, and there is no out and no lse");
  if (*segments < 1 || *segments > kMostSegments)
    throw InputError("segments is " + std::to_string(*segments) + "; it is from 1 to " +
                     std::to_string(kMostSegments));
  if (tile < 1 || tile > 2147483647)
    throw InputError("tile is " + std::to_string(tile) + "; it is from 1 to 2147483647");
  const Tensor& rows = call.q.tensor();
  const std::array<std::int64_t, 4> shape{rows.shape[0], rows.shape[1], *segments, call.value_dim};
  Result output(call.q, shape, DType::fp32), most(call.q, {shape.data(), 3}, DType::fp32),
      sum(call.q, {shape.data(), 3}, DType::fp32);
  SegmentedAttention args{.attention = call.args,
                          .segments = {.output = output.tensor(),
                                       .max = most.tensor(),
                                       .expsum = sum.tensor(),
                                       .keys = keys,
                                       .tile = static_cast<int>(tile)},
                          .skip_decode = skip_decode};
  ops.run_in_workspace(args, call.stream,
                       [&](const ServingOps& o) { o.segmented_attention(args, call.stream); });
  return nb::make_tuple(output.finish(), most.finish(), sum.finish());
}

nb::object reduce_segments(Argument<"output"> output, Argument<"max"> max,
                           Argument<"expsum"> expsum, Argument<"keys"> keys, Argument<"tile"> tile,
                           Argument<"cache_seqlens"> cache_seqlens,
                           Argument<"cu_seqlens_q"> cu_seqlens_q, Argument<"dtype"> dtype,
                           Argument<"out_scale"> out_scale, Argument<"return_lse"> return_lse,
                           Argument<"out"> given_out, Argument<"lse"> given_lse,
                           Argument<"stream"> stream) {
  const Array o(output, "segments.output");
  const Stream queue = stream_of(stream, o.required());
  const Array m(max, "segments.max"), e(expsum, "segments.expsum"),
      lengths(cache_seqlens, DType::int32, queue), starts(cu_seqlens_q, DType::int32, queue),
      scale(out_scale, DType::fp32), own_out(given_out), own_lse(given_lse);
  const Tensor& states = o.tensor();
  m.required();
  e.required();
  lengths.required();
  check_same_gpu({{&o, "segments.output"},
                  {&m, "segments.max"},
                  {&e, "segments.expsum"},
                  {&lengths, "cache_seqlens"},
                  {&starts, "cu_seqlens_q"},
                  {&scale, "out_scale"},
                  {&own_out, "out"},
                  {&own_lse, "lse"}});
  if (states.dims != 4)
    throw InputError("segments.output has " + std::to_string(states.dims) +
                     " dimensions; [tokens, heads, segments, value_dim] is wanted");
  const std::array<std::int64_t, 3> shape{states.shape[0], states.shape[1], states.shape[3]};
  own_out.floats();
  Result out = result_of(own_out, o, shape, dtype_of(dtype, dtype.kName)), lse;
  const bool with_lse = flag(return_lse);
  ReduceSegments args{.segments = {.output = states,
                                   .max = m.tensor(),
                                   .expsum = e.tensor(),
                                   .keys = integer(keys, "segments.keys"),
                                   .tile = small(integer(tile, "segments.tile"), "segments.tile")},
                      .out = out.tensor(),
                      .out_scale = scale.tensor(),
                      .query_start = starts.tensor(),
                      .kv_len = lengths.tensor()};
  if (with_lse || own_lse) {
    lse = result_of(own_lse, o, {shape.data(), 2}, DType::fp32);
    args.lse = Lse::tokens_heads(lse.tensor());
  }
  ops_for(o).run([&](const ServingOps& ops) { ops.reduce_segments(args, queue); });
  return finished(out, lse, o, queue, with_lse);
}

nb::object context_attention(const Arguments<kContext>& given) {
  PagedCall call(given);
  const Array k(given.get<"k">()), v(given.get<"v">()),
      scale_inv(given.get<"out_scale_inv">(), DType::fp32);
  call.make_results();
  ContextAttention args{.attention = call.args,
                        .k = k.floats().tensor(),
                        .v = v.floats().tensor(),
                        .skip_decode = flag(given.get<"skip_decode">()),
                        .out_scale_inv = scale_inv.tensor()};
  check_same_gpu({{&call.q, "q"}, {&k, "k"}, {&v, "v"}, {&scale_inv, "out_scale_inv"}});
  ops_for(call.q).run_in_workspace(
      args, call.stream, [&](const ServingOps& o) { o.context_attention(args, call.stream); });
  return finished(call.out, call.lse, call.q, call.stream, call.return_lse);
}

/// Sparse attention by indices on one rank: out, with the sinks, and the max and the sum of the
/// state, [tokens, heads], without them. With index_slots indices are rows of k, or of its pages.
nb::object sparse_attention(Argument<"q"> q, Argument<"k"> k, Argument<"v"> v,
                            Argument<"indices"> indices, Argument<"topk_length"> topk_length,
                            Argument<"index_slots"> index_slots, Argument<"sinks"> sinks,
                            Argument<"softmax_scale"> softmax_scale,
                            Argument<"k_descale"> k_descale, Argument<"out"> given_out,
                            Argument<"stream"> stream) {
  const Array rows(q);
  const Stream queue = stream_of(stream, rows.required());
  const Array keys(k), values(v), named(indices, DType::int32, queue),
      lengths(topk_length, DType::int32, queue), of_sinks(sinks, DType::fp32),
      scale(k_descale, DType::fp32), own_out(given_out);
  for (const Array* array : {&rows, &keys, &values, &own_out}) array->floats();
  for (const Array* array : {&keys, &values, &named}) array->required();
  check_same_gpu({{&rows, "q"},
                  {&keys, "k"},
                  {&values, "v"},
                  {&named, "indices"},
                  {&lengths, "topk_length"},
                  {&of_sinks, "sinks"},
                  {&scale, "k_descale"},
                  {&own_out, "out"}});
  const Tensor &t = rows.tensor(), &list = named.tensor(), &cache = values.tensor();
  if (t.dims != 3 || cache.dims < 3 || list.dims < 2)
    throw InputError(
        "q, v and indices have " + std::to_string(t.dims) + ", " + std::to_string(cache.dims) +
        " and " + std::to_string(list.dims) +
        " dimensions; q is [tokens, heads, head_dim], v [keys, kv_heads, value_dim] or "
        "pages, and indices [tokens, columns] or [tokens, kv_heads, columns]");
  const std::int64_t value_dim = cache.shape[cache.dims - 1], columns = list.shape[list.dims - 1];
  const std::array<std::int64_t, 4> shape{t.shape[0], t.shape[1], 1, value_dim};
  const std::array<std::int64_t, 3> of_out{t.shape[0], t.shape[1], value_dim};
  Result out = result_of(own_out, rows, of_out, t.dtype);
  Result most(rows, {shape.data(), 2}, DType::fp32), sum(rows, {shape.data(), 2}, DType::fp32);
  AttendState args{.q = t, .k = keys.tensor(), .v = cache};
  args.mask = {};
  args.max_query_len = 0;
  if (!softmax_scale.is_none()) args.score.scale = single(softmax_scale, softmax_scale.kName);
  args.index = {small(std::max<std::int64_t>(columns, 1), "the columns of indices"),
                flag(index_slots)};
  args.indices = list;
  args.index_len = lengths.tensor();
  args.k_scale = args.v_scale = scale.tensor();
  if (!args.index.slots) args.total_keys = args.k.shape[0];
  const auto up = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  const std::size_t state =
      up(ServingOps::state_bytes(shape[0], std::max<std::int64_t>(shape[1], 1), value_dim));
  const std::size_t exported =
      up(static_cast<std::size_t>(shape[0] * shape[1] * value_dim) * sizeof(float));
  ops_for(rows).run_in_memory(
      [&](const ServingOps& ops) { return state + exported + ops.workspace_bytes(args); }, queue,
      [&](const ServingOps& ops, const Workspace& memory) {
        auto* const data = static_cast<std::byte*>(memory.data);
        args.state = {data, state};
        args.workspace = {data + state + exported, memory.bytes - state - exported};
        ops.attend_state(args, queue);
        ops.finish_state({.state = args.state, .out = out.tensor(), .sinks = of_sinks.tensor()},
                         queue);
        const Device device = t.device;
        ops.export_state(
            {.state = args.state,
             .output =
                 Tensor(data + state, DType::fp32, {shape[0], shape[1], 1, value_dim}, device),
             .max = Tensor(most.tensor().data, DType::fp32, {shape[0], shape[1], 1}, device),
             .expsum = Tensor(sum.tensor().data, DType::fp32, {shape[0], shape[1], 1}, device)},
            queue);
      });
  return nb::make_tuple(out.finish(), most.finish(), sum.finish());
}

void append_kv(Argument<"k"> k, Argument<"v"> v, Argument<"k_cache"> k_cache,
               Argument<"v_cache"> v_cache, Argument<"slot_mapping"> slot_mapping,
               Argument<"k_descale"> k_descale, Argument<"v_descale"> v_descale,
               Argument<"kv_dtype"> kv_dtype, Argument<"stream"> stream) {
  const Array new_k(k);
  const Stream queue = stream_of(stream, new_k.required());
  const Array new_v(v), keys(k_cache), values(v_cache), slots(slot_mapping, DType::int64, queue),
      scale_k(k_descale, DType::fp32), scale_v(v_descale, DType::fp32);
  std::optional<DType> kv;
  if (!kv_dtype.is_none()) kv = dtype_of(kv_dtype, kv_dtype.kName);
  const bool are_rows = kv && is_latent_row(*kv);
  for (const Array* array : {&new_k, &new_v}) array->floats();
  if (!are_rows) {
    keys.floats();
    values.floats();
  }
  check_same_gpu({{&new_k, "k"},
                  {&new_v, "v"},
                  {&keys, "k_cache"},
                  {&values, "v_cache"},
                  {&slots, "slot_mapping"},
                  {&scale_k, "k_descale"},
                  {&scale_v, "v_descale"}});
  const AppendKv args{.k = new_k.required().tensor(),
                      .v = new_v.tensor(),
                      .k_cache = keys.required().writable().tensor(),
                      .v_cache = are_rows ? values.tensor() : values.required().writable().tensor(),
                      .slots = slots.required().tensor(),
                      .k_scale = scale_k.tensor(),
                      .v_scale = scale_v.tensor(),
                      .kv = kv};
  ops_for(new_k).run([&](const ServingOps& o) { o.append_kv(args, queue); });
}

}  // namespace

void bind_serving(nb::module_& m) {
  def_by_name(m, "merge_attn_states", &merge_attn_states, Function::merge_attn_states);
  def_by_name(m, "merge_state", &merge_state, Function::merge_state);
  def_by_name(m, "merge_states", &merge_states, Function::merge_states);
  def_by_name(m, "cross_rank_merge", &cross_rank_merge, Function::cross_rank_merge);
  ManyArguments<&segmented_attention, kSegmented, Function::paged>::define(m,
                                                                           "segmented_attention");
  def_by_name(m, "reduce_segments", &reduce_segments, Function::paged);
  ManyArguments<&context_attention, kContext, Function::paged>::define(m, "context_attention");
  def_by_name(m, "sparse_attention", &sparse_attention, Function::attend);
  def_by_name(m, "append_kv", &append_kv, Function::paged);
  m.def("forget_ops", [] {  // in the child of a fork their threads are the parent's
    for (auto& ops : all_ops()) static_cast<void>(ops.release());
    all_ops().clear();
  });
}

}  // namespace longspan::python
