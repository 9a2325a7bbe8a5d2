// attend() keeps its layers (plans.hpp); Attention is one layer. Both read the same arguments of a
// run, which the Python functions give by position, in the order of `Given`.
//
// Arrays of four dimensions are flash-attention's, [batch, tokens, heads, head_dim]; the library
// has them with tokens and heads exchanged.
#include "python/src/attention.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <limits>
#include <utility>

#include "longspan/attention.hpp"
#include "longspan/error.hpp"
#include "longspan/strategy.hpp"
#include "python/src/arrays.hpp"
#include "python/src/communicators.hpp"
#include "python/src/words.hpp"

namespace longspan::python {
namespace {

/// The arguments of a run, as Python gives them.
struct Given {
  nb::handle q, k, v;
  nb::handle causal;  // a bool in attend(), flags of sequences or None in a layer
  nb::handle cu_seqlens_q, cache_seqlens, block_table;
  nb::handle k_new, v_new;
  nb::handle q_descale, k_descale, v_descale, out_scale;
  nb::handle alibi_slopes, sinks, qq_bias, documents;
  nb::handle total_keys, total_queries, key_table, query_table;
  nb::handle skip_decode, return_lse, out, lse, stream;
};
constexpr std::size_t kGiven = sizeof(Given) / sizeof(nb::handle);

/// What attend() is told besides.
struct Asked {
  nb::handle comm, softmax_scale, window_size, softcap, keys, queries, invariant, exchange,
      strategy, max_seqlen_q, max_seqlen_k, results, ranks_per_node;
};
constexpr std::size_t kAsked = sizeof(Asked) / sizeof(nb::handle);

template <class Fields>
Fields unpack(const nb::args& args, std::size_t first) {
  constexpr std::size_t count = sizeof(Fields) / sizeof(nb::handle);
  std::array<nb::handle, count> handles;
  for (std::size_t i = 0; i < count; ++i) handles[i] = args[first + i];
  return std::bit_cast<Fields>(handles);
}

Exchange exchange_of(nb::handle given) {
  const std::string asked = text(given, "exchange");
  for (const Exchange way : {Exchange::automatic, Exchange::peer_buffers,
                             Exchange::peer_buffers_apart, Exchange::gather})
    if (asked == name(way)) return way;
  throw InputError("exchange is '" + asked +
                   "'; 'auto', 'peer-buffers', 'peer-buffers-apart' and 'gather' "
                   "are supported");
}

std::int64_t count_of(nb::handle given, const char* name) {
  if (given.is_none()) return -1;
  const std::int64_t count = integer(given, name);
  if (count < 0)
    throw InputError(std::string(name) + " is " + std::to_string(count) + "; it is at least 0");
  return count;
}

std::string shape_text(const Tensor& t) {
  std::string made = "[";
  for (int d = 0; d < t.dims; ++d) made += (d > 0 ? ", " : "") + std::to_string(t.shape[d]);
  return made + "]";
}

/// [batch, tokens, heads, dim] <-> [batch, heads, tokens, dim]
Tensor exchanged(Tensor t) {
  if (t.dims != 4) return t;
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

/// [batch, tokens, kv_heads, dim] -> [batch tokens, kv_heads, dim]
Tensor flat(Tensor t, const char* name) {
  if (t.dims != 4) return t;
  if (t.shape[0] > 1 && t.shape[1] > 0 && t.stride[0] != t.shape[1] * t.stride[1])
    throw InputError(std::string(name) + " is " + shape_text(t) +
                     " and its sequences do not follow each other in memory; copy it");
  std::int64_t rows = 0;
  if (__builtin_mul_overflow(t.shape[0], t.shape[1], &rows))
    throw InputError(std::string(name) + " is " + shape_text(t) + ", more rows than 63 bits count");
  for (int d = 1; d < 3; ++d) {
    t.stride[d - 1] = t.stride[d];
    t.shape[d] = t.shape[d + 1];
  }
  t.shape[0] = rows;
  t.stride[2] = t.stride[3];
  t.dims = 3;
  return t;
}

/// The arrays of one call, and where its results go.
struct Call {
  explicit Call(const Given& g)
      : q(g.q, "q"),
        k(g.k, "k"),
        v(g.v, "v"),
        causal(PyBool_Check(g.causal.ptr()) ? nb::none() : nb::borrow(g.causal), "causal",
               DType::uint8),
        cu_seqlens_q(g.cu_seqlens_q, "cu_seqlens_q", DType::int32),
        cache_seqlens(g.cache_seqlens, "cache_seqlens", DType::int32),
        block_table(g.block_table, "block_table"),
        k_new(g.k_new, "k_new"),
        v_new(g.v_new, "v_new"),
        q_descale(g.q_descale, "q_descale", DType::fp32),
        k_descale(g.k_descale, "k_descale", DType::fp32),
        v_descale(g.v_descale, "v_descale", DType::fp32),
        out_scale(g.out_scale, "out_scale", DType::fp32),
        alibi_slopes(g.alibi_slopes, "alibi_slopes", DType::fp32),
        sinks(g.sinks, "sinks", DType::fp32),
        qq_bias(g.qq_bias, "qq_bias"),
        documents(g.documents, "documents", DType::int64),
        key_table(g.key_table, "key_table", DType::int64),
        query_table(g.query_table, "query_table", DType::int64),
        given_out(g.out, "out"),
        given_lse(g.lse, "lse"),
        total_keys(count_of(g.total_keys, "total_keys")),
        total_queries(count_of(g.total_queries, "total_queries")),
        skip_decode(flag(g.skip_decode, "skip_decode")),
        return_lse(flag(g.return_lse, "return_lse")) {
    const Tensor& rows = q.required().tensor();
    k.required();
    v.required();
    if (rows.dims != 3 && rows.dims != 4)
      throw InputError(
          "q is " + shape_text(rows) +
          "; [tokens, heads, head_dim] is wanted, or [batch, tokens, heads, head_dim]");
    const Tensor &keys = k.tensor(), &values = v.tensor();
    if (keys.dims < 3 || keys.dims > 5 || values.dims < 3)
      throw InputError("k is " + shape_text(keys) + " and v is " + shape_text(values) +
                       "; [keys, kv_heads, head_dim] is wanted, or [batch, capacity, kv_heads, "
                       "head_dim], or pages with a block_table");
    if (k_new) {
      k.writable();
      v.writable();
    }
    stream = stream_of(g.stream, q);
  }

  bool batched() const { return q.tensor().dims == 4; }
  std::int64_t batch() const { return batched() ? q.tensor().shape[0] : 1; }
  std::int64_t tokens() const { return q.tensor().shape[batched() ? 1 : 0]; }
  std::int64_t heads() const { return q.tensor().shape[batched() ? 2 : 1]; }
  std::int64_t head_dim() const { return q.tensor().shape[batched() ? 3 : 2]; }
  std::int64_t kv_heads() const {
    const Tensor& t = k.tensor();
    return t.shape[t.dims == 5 ? 1 : t.dims - 2];
  }
  std::int64_t value_dim() const {
    const Tensor& t = v.tensor();
    return t.shape[k.tensor().dims == 5 ? 2 : t.dims - 1];
  }
  std::int64_t own_keys() const {  // of each sequence, where nobody says how many there are
    const Tensor& t = k.tensor();
    if (t.dims > 3 && block_table)
      throw InputError("cache_seqlens is missing: the length of each sequence in pages");
    return t.dims == 3 ? t.shape[0] : t.shape[1];
  }

  /// Every array on the GPU of the communicator. The device itself is checked by the library.
  void check_gpu(int gpu) const {
    if (gpu < 0) return;
    const std::pair<const Array*, const char*> all[] = {{&q, "q"},
                                                        {&k, "k"},
                                                        {&v, "v"},
                                                        {&causal, "causal"},
                                                        {&cu_seqlens_q, "cu_seqlens_q"},
                                                        {&cache_seqlens, "cache_seqlens"},
                                                        {&block_table, "block_table"},
                                                        {&k_new, "k_new"},
                                                        {&v_new, "v_new"},
                                                        {&q_descale, "q_descale"},
                                                        {&k_descale, "k_descale"},
                                                        {&v_descale, "v_descale"},
                                                        {&out_scale, "out_scale"},
                                                        {&alibi_slopes, "alibi_slopes"},
                                                        {&sinks, "sinks"},
                                                        {&qq_bias, "qq_bias"},
                                                        {&documents, "documents"},
                                                        {&key_table, "key_table"},
                                                        {&query_table, "query_table"},
                                                        {&given_out, "out"},
                                                        {&given_lse, "lse"}};
    for (const auto& [array, name] : all) require_gpu(*array, name, gpu);
  }

  /// The rows that the rank gets of each sequence, where one rule and one length say it.
  std::int64_t own_rows(const Sharding& rule, const Communicator& world) const {
    if (cu_seqlens_q || query_table)
      throw InputError(
          "out is missing: with results by rows of several sequences, or by a table, how many rows "
          "this rank gets is not known here");
    return rule.resolve(tokens(), world.rank(), world.size()).local_len(tokens());
  }

  /// Results, of the caller's own or new ones: the part that the rank gets.
  void make_results(const Options& options, const Communicator& world) {
    const DType dtype = options.dtypes.of_out();
    std::array<std::int64_t, 4> shape{};
    const Tensor& rows = q.tensor();
    std::copy_n(rows.shape.begin(), rows.dims, shape.begin());
    const auto dims = static_cast<std::size_t>(rows.dims);
    shape[dims - 1] = options.of_values();
    if (options.results.part == ResultPart::heads && options.heads >= world.size())
      shape[dims - 2] = result_heads(options.heads, world.rank(), world.size()).size();
    if (options.results.part == ResultPart::rows)
      shape[dims - 3] = given_out ? given_out.tensor().shape[given_out.tensor().dims > 3 ? 1 : 0]
                                  : own_rows(options.results.rows, world);
    out = result_of(given_out, q, {shape.data(), dims}, dtype);
    if (return_lse || given_lse)
      lse = result_of(given_lse, q, {shape.data(), dims - 1}, DType::fp32);
  }

  /// Everything but the lengths, which may have to be asked for.
  AttentionArgs args() const {
    AttentionArgs a;
    a.q = exchanged(q.tensor());
    a.k = k.tensor();
    a.v = v.tensor();
    a.out = exchanged(out.tensor());
    if (return_lse || given_lse) a.lse = Lse::tokens_heads(lse.tensor());
    a.query_start = cu_seqlens_q.tensor();
    a.kv_len = cache_seqlens.tensor();
    a.block_table = block_table.tensor();
    a.key_table = key_table.tensor();
    a.query_table = query_table.tensor();
    a.new_k = flat(k_new.tensor(), "k_new");
    a.new_v = flat(v_new.tensor(), "v_new");
    a.q_scale = q_descale.tensor();
    a.k_scale = k_descale.tensor();
    a.v_scale = v_descale.tensor();
    a.out_scale = out_scale.tensor();
    a.sinks = sinks.tensor();
    a.slopes = alibi_slopes.tensor();
    a.qq_bias = qq_bias.tensor();
    a.causal = causal.tensor();
    a.documents = documents.tensor();
    a.skip_decode = skip_decode;
    return a;
  }

  nb::object finish() {
    nb::object made = out.finish();
    if (!return_lse) return made;
    return nb::make_tuple(made, lse.finish());
  }
  bool needs_wait() const { return out.needs_wait() || lse.needs_wait(); }

  Array q, k, v, causal, cu_seqlens_q, cache_seqlens, block_table, k_new, v_new, q_descale,
      k_descale, v_descale, out_scale, alibi_slopes, sinks, qq_bias, documents, key_table,
      query_table, given_out, given_lse;
  std::int64_t total_keys, total_queries;
  bool skip_decode, return_lse;
  Stream stream;
  Result out, lse;
};

/// Lengths of the whole sequences that nobody has given: what all ranks hold together.
struct Totals {
  std::int64_t keys = 0, queries = 0, most_queries = 0;
};

Totals totals_of(const Communicator& world, const Call& call, bool sharded_queries,
                 bool needs_most) {
  Totals totals{call.total_keys, call.total_queries, call.tokens()};
  const bool ask_keys = totals.keys < 0 && !call.cache_seqlens;
  const bool ask_rows = sharded_queries && (totals.queries < 0 || needs_most);
  if (!ask_keys && !ask_rows) return totals;
  const std::int64_t own[] = {ask_keys ? call.own_keys() : 0, call.tokens()};
  if (world.size() == 1) {
    if (ask_keys) totals.keys = own[0];
    if (totals.queries < 0) totals.queries = own[1];
    return totals;
  }
  const std::string mine = std::to_string(own[0]) + " " + std::to_string(own[1]);
  std::int64_t keys = 0, rows = 0;
  for (const std::string& said : world.gather(mine, "count of keys and query rows")) {
    std::int64_t one = 0, other = 0;
    const auto rest = std::from_chars(said.data(), said.data() + said.size(), one);
    std::from_chars(rest.ptr + 1, said.data() + said.size(), other);
    keys += one;
    rows += other;
    totals.most_queries = std::max(totals.most_queries, other);
  }
  if (ask_keys) totals.keys = keys;
  if (totals.queries < 0) totals.queries = rows;
  return totals;
}

/// Lengths into the arguments; arrays of them where a batch has none.
void set_lengths(AttentionArgs& args, const Call& call, const Totals& totals, bool sharded_queries,
                 Device device, UniformArrays& arrays) {
  const std::int64_t batch = call.batch();
  const std::int64_t rows = sharded_queries ? totals.queries : call.tokens();
  if (batch > 1 && !args.query_start) args.query_start = arrays.steps(device, batch + 1, rows);
  if (!args.kv_len) {
    if (batch > 1)
      args.kv_len = arrays.constant(device, batch, totals.keys);
    else
      args.total_keys = totals.keys;
  } else if (call.total_keys >= 0) {
    throw InputError("total_keys and cache_seqlens are given; lengths stand in one of them");
  }
  if (sharded_queries)
    args.total_tokens = rows * (call.batched() && call.cu_seqlens_q.tensor().dims == 0 ? batch : 1);
}

/// Options of attend() that need no other rank.
Options options_of(const Call& call, const Given& given, const Asked& asked) {
  Options o;
  o.heads = small(call.heads(), "the number of heads of q");
  o.kv_heads = small(call.kv_heads(), "the number of heads of k");
  o.head_dim = small(call.head_dim(), "the last dimension of q");
  o.value_dim = small(call.value_dim(), "the last dimension of v");
  const Tensor &q = call.q.tensor(), &k = call.k.tensor();
  for (const auto& [t, name] : {std::pair{&q, "q"}, std::pair{&k, "k"}, {&call.v.tensor(), "v"}})
    if (!is_float(t->dtype))
      throw InputError(std::string(name) + " is " + dtype_name(t->dtype) +
                       "; a float type is wanted");
  if (!is_fp8(q.dtype)) o.dtypes.compute = q.dtype;
  for (const auto& [t, name] : {std::pair{&k, "k"}, {&call.v.tensor(), "v"}})
    if (!is_fp8(t->dtype) && t->dtype != o.dtypes.compute)
      throw InputError(std::string(name) + " is " + dtype_name(t->dtype) + "; " +
                       dtype_name(o.dtypes.compute) + ", as q, or fp8 is wanted");
  if (call.given_out && !is_float(call.given_out.tensor().dtype))
    throw InputError(std::string("out is ") + dtype_name(call.given_out.tensor().dtype) +
                     "; a float type is wanted");
  o.dtypes.query = q.dtype;
  o.dtypes.kv = k.dtype;
  o.dtypes.out = call.given_out ? call.given_out.tensor().dtype : o.dtypes.compute;
  const bool by_sequence = !PyBool_Check(given.causal.ptr());
  o.mask = mask_of(by_sequence ? nb::handle(Py_False) : given.causal, asked.window_size);
  o.score =
      score_of(asked.softmax_scale, asked.softcap, Alibi::query);  // as flash-attention has it
  o.keys = sharding_of(asked.keys, "keys");
  o.queries = maybe_sharding(asked.queries, "queries");
  o.results = results_of(asked.results);
  o.invariant = flag(asked.invariant, "invariant");
  o.exchange = exchange_of(asked.exchange);
  o.strategy = text(asked.strategy, "strategy");
  o.ranks_per_node = small(integer(asked.ranks_per_node, "ranks_per_node"), "ranks_per_node");
  o.limits.max_kv_len = std::max<std::int64_t>(0, count_of(asked.max_seqlen_k, "max_seqlen_k"));
  o.limits.max_query_len = std::max<std::int64_t>(0, count_of(asked.max_seqlen_q, "max_seqlen_q"));
  const Tensor& lengths = call.cache_seqlens.tensor();
  o.limits.max_batch =
      small(lengths.dims == 1 && lengths.shape[0] > 0 ? lengths.shape[0] : call.batch(),
            "the number of sequences");
  if (o.limits.max_batch == 0) o.limits.max_batch = 1;
  return o;
}

/// Sizes of the layer: rounded up, so that a sequence that grows does not need a new one each time.
/// They are alike on all ranks.
void set_limits(Options& o, const Call& call, const Totals& totals, Device device) {
  if ((o.queries && o.queries->layout == Layout::listed) ||
      (o.results.part == ResultPart::rows && o.results.rows.layout == Layout::listed))
    o.limits.max_tokens = std::max<std::int64_t>(1, call.query_table.tensor().shape[0]);
  else
    o.limits.max_tokens =
        rounded_up((o.queries ? totals.most_queries : call.tokens()) * call.batch());
  if (device == Device::host) return;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (o.limits.max_kv_len == 0 && totals.keys > 0)
    o.limits.max_kv_len = std::min(kMost, rounded_up(totals.keys));
  if (o.limits.max_query_len == 0 && !call.cu_seqlens_q)
    o.limits.max_query_len =
        std::min(kMost, rounded_up(o.queries ? totals.queries : call.tokens()));
}

void check_batch(const Call& call) {
  const Tensor &q = call.q.tensor(), &k = call.k.tensor();
  if (call.batched() && k.dims == 4 && !call.block_table && k.shape[0] != q.shape[0])
    throw InputError("q is " + shape_text(q) + " and k is " + shape_text(k) +
                     ": the numbers of sequences differ");
}

nb::object attend(nb::args args) {
  if (args.size() != kGiven + kAsked) throw nb::type_error("attend: see longspan.attend");
  const auto given = unpack<Given>(args, 0);
  const auto asked = unpack<Asked>(args, kGiven);
  Call call(given);
  check_batch(call);
  const nb::object held = comm_or_default(asked.comm, call.q.tensor().device, call.q.gpu());
  Comm& comm = comm_of(held);
  call.check_gpu(comm.world().gpu());
  Options options = options_of(call, given, asked);
  call.make_results(options, comm.world());
  AttentionArgs run = call.args();
  comm.alone([&](const Communicator& world) {
    const bool by_table = options.queries && (options.queries->layout == Layout::ranges ||
                                              options.queries->layout == Layout::listed);
    Totals totals = totals_of(world, call, options.queries.has_value(), by_table);
    if (options.queries && !by_table)
      totals.most_queries =
          options.queries->resolve(totals.queries, 0, world.size()).max_local_len(totals.queries);
    set_limits(options, call, totals, world.device());
    Plan& plan = comm.plans().find(world, options);
    set_lengths(run, call, totals, options.queries.has_value(), world.device(), plan.arrays);
    plan.layer.run(run, call.stream);
    if (call.needs_wait()) plan.layer.wait(call.stream);
  });
  return call.finish();
}

/// Python's Attention: one layer.
class Layer {
 public:
  Layer(nb::handle comm, const Options& options) : held_(nb::borrow(comm)) {
    comm_of(held_).alone(
        [&](const Communicator& world) { layer_ = std::make_unique<Attention>(world, options); });
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  nb::object run(nb::args args) {
    if (args.size() != kGiven) throw nb::type_error("run: see longspan.Attention");
    Call call(unpack<Given>(args, 0));
    check_batch(call);
    Comm& comm = comm_of(held_);
    call.check_gpu(comm.world().gpu());
    const Options& options = layer_->options();
    call.make_results(options, comm.world());
    AttentionArgs run = call.args();
    comm.alone([&](const Communicator& world) {
      const bool sharded = options.queries.has_value();
      set_lengths(run, call, totals_of(world, call, sharded, false), sharded, world.device(),
                  arrays_);
      layer_->run(run, call.stream);
      if (call.needs_wait()) layer_->wait(call.stream);
    });
    return call.finish();
  }

  void append(nb::handle k_new, nb::handle v_new, nb::handle k, nb::handle v,
              nb::handle cu_seqlens_q, nb::handle cache_seqlens, nb::handle block_table,
              nb::handle total_keys, nb::handle key_table, nb::handle k_descale,
              nb::handle v_descale, nb::handle stream) {
    const Array new_k(k_new, "k_new"), new_v(v_new, "v_new"), keys(k, "k"), values(v, "v"),
        starts(cu_seqlens_q, "cu_seqlens_q", DType::int32),
        lengths(cache_seqlens, "cache_seqlens", DType::int32), table(block_table, "block_table"),
        cut(key_table, "key_table", DType::int64), k_scale(k_descale, "k_descale", DType::fp32),
        v_scale(v_descale, "v_descale", DType::fp32);
    Append a;
    a.new_k = flat(new_k.required().tensor(), "k_new");
    a.new_v = flat(new_v.tensor(), "v_new");
    a.k = keys.required().writable().tensor();
    a.v = values.required().writable().tensor();
    a.total_keys = std::max<std::int64_t>(0, count_of(total_keys, "total_keys"));
    a.query_start = starts.tensor();
    a.kv_len = lengths.tensor();
    a.block_table = table.tensor();
    a.key_table = cut.tensor();
    a.k_scale = k_scale.tensor();
    a.v_scale = v_scale.tensor();
    const Stream queue = stream_of(stream, new_k);
    const std::int64_t batch = new_k.tensor().dims == 4 ? new_k.tensor().shape[0] : 1;
    comm_of(held_).alone([&](const Communicator& world) {
      if (batch > 1 && !a.query_start)
        a.query_start = arrays_.steps(world.device(), batch + 1, new_k.tensor().shape[1]);
      layer_->append(a, queue);
    });
  }

  void wait(nb::handle stream) {
    const Stream queue = stream.is_none() ? Stream{} : given_stream(stream);
    comm_of(held_).alone([&](const Communicator&) { layer_->wait(queue); });
  }

  Attention& layer() { return *layer_; }
  nb::object comm() { return held_; }

 private:
  nb::object held_;
  std::unique_ptr<Attention> layer_;
  UniformArrays arrays_;
};

Layer* make_layer(nb::handle given, nb::handle heads, nb::handle kv_heads, nb::handle head_dim,
                  nb::handle value_dim, nb::handle dtype, nb::handle q_dtype, nb::handle kv_dtype,
                  nb::handle out_dtype, nb::handle causal, nb::handle softmax_scale,
                  nb::handle window_size, nb::handle softcap, nb::handle alibi, nb::handle keys,
                  nb::handle queries, nb::handle results, nb::handle max_queries,
                  nb::handle max_batch, nb::handle max_seqlen_k, nb::handle max_total_keys,
                  nb::handle max_seqlen_q, nb::handle invariant, nb::handle strategy,
                  nb::handle exchange, nb::handle threads, nb::handle check_arrays,
                  nb::handle profile, nb::handle tf32, nb::handle fp8_products,
                  nb::handle bf16_products, nb::handle ranks_per_node) {
  Options o;
  o.heads = small(integer(heads, "heads"), "heads");
  o.kv_heads = kv_heads.is_none() ? o.heads : small(integer(kv_heads, "kv_heads"), "kv_heads");
  o.head_dim = small(integer(head_dim, "head_dim"), "head_dim");
  if (!value_dim.is_none()) o.value_dim = small(integer(value_dim, "value_dim"), "value_dim");
  o.dtypes.compute = dtype_of(dtype, "dtype");
  if (!q_dtype.is_none()) o.dtypes.query = dtype_of(q_dtype, "q_dtype");
  if (!kv_dtype.is_none()) o.dtypes.kv = dtype_of(kv_dtype, "kv_dtype");
  if (!out_dtype.is_none()) o.dtypes.out = dtype_of(out_dtype, "out_dtype");
  o.dtypes.tf32 = flag(tf32, "tf32");
  o.dtypes.fp8_products = flag(fp8_products, "fp8_products");
  o.dtypes.bf16_products = flag(bf16_products, "bf16_products");
  o.mask = mask_of(causal, window_size);
  o.score = score_of(softmax_scale, softcap, alibi_of(alibi));
  o.keys = sharding_of(keys, "keys");
  o.queries = maybe_sharding(queries, "queries");
  o.results = results_of(results);
  o.limits.max_tokens = integer(max_queries, "max_queries");
  o.limits.max_batch = small(integer(max_batch, "max_batch"), "max_batch");
  o.limits.max_kv_len = integer(max_seqlen_k, "max_seqlen_k");
  o.limits.max_total_keys = integer(max_total_keys, "max_total_keys");
  o.limits.max_query_len = integer(max_seqlen_q, "max_seqlen_q");
  o.invariant = flag(invariant, "invariant");
  o.strategy = text(strategy, "strategy");
  o.ranks_per_node = small(integer(ranks_per_node, "ranks_per_node"), "ranks_per_node");
  o.exchange = exchange_of(exchange);
  o.threads = small(integer(threads, "threads"), "threads");
  o.debug.check_arrays = flag(check_arrays, "check_arrays");
  o.debug.profile = flag(profile, "profile");
  return new Layer(comm_or_default(given, Device::host, -1), o);
}

/// For bench/python_overhead.py: microseconds of a run in C++, the arrays read and the layer made.
/// On a GPU these are of queueing it.
double time_attend(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle repeats) {
  const Array a(q, "q"), b(k, "k"), c(v, "v"), o(out, "out");
  const AttentionArgs args{.q = a.required().tensor(),
                           .k = b.required().tensor(),
                           .v = c.required().tensor(),
                           .out = o.required().tensor(),
                           .total_keys = b.tensor().shape[0]};
  Attention layer(self(args.q.device, a.gpu()), {.heads = small(args.q.shape[1], "heads of q"),
                                                 .kv_heads = small(args.k.shape[1], "heads of k"),
                                                 .head_dim = small(args.q.shape[2], "columns of q"),
                                                 .dtypes = {.compute = args.q.dtype},
                                                 .mask = {.causal = true},
                                                 .limits = {.max_tokens = args.q.shape[0]}});
  const std::int64_t count = integer(repeats, "repeats");
  const nb::gil_scoped_release released;
  const auto begin = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < count; ++i) layer.run(args);
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - begin;
  layer.wait();
  return spent.count() / static_cast<double>(count);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attend", &attend);
  def_by_position(m, "time_attend", &time_attend);
  nb::class_<Layer> layer(m, "Layer");
  def_by_position(layer, "append", &Layer::append);
  def_by_position(layer, "wait", &Layer::wait);
  layer.def("run", &Layer::run)
      .def("comm", &Layer::comm)
      .def("shard",
           [](Layer& l, nb::handle length) {
             const Shard shard = l.layer().shard(integer(length, "length"));
             return nb::make_tuple(shard.length, shard.rank, shard.ranks);
           })
      .def("keys", [](Layer& l) { return l.layer().options().keys; })
      .def("strategy", [](Layer& l) { return std::string(l.layer().strategy().name); })
      .def("exchange", [](Layer& l) { return l.layer().exchange().describe(); })
      .def("workspace_bytes", [](Layer& l) { return l.layer().workspace_bytes(); })
      .def("phases", [](Layer& l) {
        const Phases p = l.layer().phases();
        nb::dict made;
        made["attend"] = p.attend;
        made["exchange"] = p.exchange;
        made["merge"] = p.merge;
        return made;
      });
  def_by_position(m, "layer", &make_layer);
}

}  // namespace longspan::python
