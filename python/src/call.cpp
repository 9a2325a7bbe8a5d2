#include "python/src/call.hpp"

#include <algorithm>
#include <charconv>
#include <functional>
#include <span>
#include <utility>

#include "longspan/error.hpp"

namespace longspan::python {
namespace {

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

/// The rows that the rank gets of each sequence, where one rule and one length say it.
std::int64_t own_rows(const Call& call, const Sharding& rule, const Communicator& world) {
  if (call.cu_seqlens_q || call.query_table)
    throw InputError(
        "out is missing: with results by rows of several sequences, or by a table, how many rows "
        "this rank gets is not known here");
  return rule.resolve(call.tokens(), world.rank(), world.size()).local_len(call.tokens());
}

}  // namespace

std::int64_t count_of(nb::handle given, const char* name) {
  return given.is_none() ? -1 : small(integer(given, name), name);
}

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

Call::Call(const Given& g)
    : q(g.q, "q"),
      stream(stream_of(g.stream, q.required())),
      k(g.k, "k"),
      v(g.v, "v"),
      causal(PyBool_Check(g.causal.ptr()) ? nb::none() : nb::borrow(g.causal), "causal",
             DType::uint8, stream),
      cu_seqlens_q(g.cu_seqlens_q, "cu_seqlens_q", DType::int32, stream),
      cache_seqlens(g.cache_seqlens, "cache_seqlens", DType::int32, stream),
      block_table(Array::table(g.block_table, "block_table", stream)),
      k_new(g.k_new, "k_new"),
      v_new(g.v_new, "v_new"),
      q_descale(g.q_descale, "q_descale", DType::fp32),
      k_descale(g.k_descale, "k_descale", DType::fp32),
      v_descale(g.v_descale, "v_descale", DType::fp32),
      out_scale(g.out_scale, "out_scale", DType::fp32),
      alibi_slopes(g.alibi_slopes, "alibi_slopes", DType::fp32),
      sinks(g.sinks, "sinks", DType::fp32),
      qq_bias(g.qq_bias, "qq_bias"),
      documents(g.documents, "documents", DType::int64, stream),
      key_table(g.key_table, "key_table", DType::int64, stream),
      query_table(g.query_table, "query_table", DType::int64, stream),
      given_out(g.out, "out"),
      given_lse(g.lse, "lse"),
      total_keys(count_of(g.total_keys, "total_keys")),
      total_queries(count_of(g.total_queries, "total_queries")),
      skip_decode(flag(g.skip_decode, "skip_decode")),
      return_lse(flag(g.return_lse, "return_lse")) {
  const Tensor& rows = q.tensor();
  for (const Array& array : {std::cref(q), std::cref(k), std::cref(v)}) array.required().floats();
  if (rows.dims != 3 && rows.dims != 4)
    throw InputError("q is " + shape_text(rows) +
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
  if (batched() && keys.dims == 4 && !block_table && keys.shape[0] != rows.shape[0])
    throw InputError("q is " + shape_text(rows) + " and k is " + shape_text(keys) +
                     ": the numbers of sequences differ");
  refuse_by_sequence(alibi_slopes, "alibi_slopes", "[heads]");
  for (const auto& [factors, name] :
       {std::pair{&q_descale, "q_descale"}, {&k_descale, "k_descale"}, {&v_descale, "v_descale"}})
    refuse_by_sequence(*factors, name, "[1] or [kv_heads]");
  if (batched() && batch() == 0) leave_out_sequences();
}

void Call::leave_out_sequences() {
  const std::int64_t heads = kv_heads(), dim = head_dim(), columns = value_dim();
  Tensor &keys = k.tensor(), &values = v.tensor();
  keys = {keys.data, keys.dtype, {0, heads, dim}, keys.device};
  values = {values.data, values.dtype, {0, heads, columns}, values.device};
  for (Array* array : {&causal, &cu_seqlens_q, &cache_seqlens, &block_table, &k_new, &v_new})
    array->leave_out();
  total_keys = 0;
}

std::int64_t Call::own_keys() const {
  const Tensor& t = k.tensor();
  if (t.dims > 3 && block_table)
    throw InputError("cache_seqlens is missing: the length of each sequence in pages");
  return t.dims == 3 ? t.shape[0] : t.shape[1];
}

void Call::check_gpu(int gpu) const {
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

void Call::make_results(const Options& options, const Communicator& world) {
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
                                : own_rows(*this, options.results.rows, world);
  out = result_of(given_out, q, {shape.data(), dims}, dtype);
  if (return_lse || given_lse) lse = result_of(given_lse, q, {shape.data(), dims - 1}, DType::fp32);
}

AttentionArgs Call::args() const {
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

nb::object Call::finish() {
  nb::object made = out.finish();
  if (!return_lse) return made;
  return nb::make_tuple(made, lse.finish());
}

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

}  // namespace longspan::python
